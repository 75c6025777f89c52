// Elements described as plain values, and put into the page by changing only what differs: focus, selection and scroll
// positions stay, and nothing grows. Texts go in as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "line", "path", "text", "title", "circle", "polyline"]);

// Only `h` makes one: an object of a document that looks like one is a text.
class Described {
  constructor(tag, attributes, children) {
    Object.assign(this, { tag, attributes, children });
  }
}

// Whatever stands in a document, as a text.
export const written = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

const shown = (children) => children.flat(9).filter((one) => one != null && one !== false).map((one) => (one instanceof Described ? one : written(one)));

// A described element: h("p", {class: "x"}, "text", h("b", {}, "more")). Attributes that are null or false are left out;
// lists among the children are flattened, null and false left out.
export function h(tag, attributes, ...children) {
  return new Described(tag, attributes || {}, shown(children));
}

// Make the children of `parent` those that are described.
export function patch(parent, ...children) {
  const wanted = shown(children);
  wanted.forEach((one, at) => {
    const there = parent.childNodes[at];
    if (!there) parent.append(made(one, parent));
    else if (!fits(there, one)) there.replaceWith(made(one, parent));
    else if (typeof one === "object") update(there, one);
    else if (there.data !== one) there.data = one;
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

function fits(node, wanted) {
  if (typeof wanted !== "object") return node.nodeType === Node.TEXT_NODE;
  return node.described === wanted.tag && (node.getAttribute("data-key") || null) === (wanted.attributes["data-key"] || null);
}

function made(wanted, parent) {
  if (typeof wanted !== "object") return document.createTextNode(wanted);
  const isDrawing = SVG_TAGS.has(wanted.tag) && (wanted.tag !== "title" || parent.namespaceURI === SVG);
  const node = isDrawing ? document.createElementNS(SVG, wanted.tag) : document.createElement(wanted.tag);
  node.described = wanted.tag;
  node.given = {};
  update(node, wanted);
  return node;
}

function update(node, wanted) {
  for (const name of Object.keys(node.given)) if (wanted.attributes[name] == null || wanted.attributes[name] === false) unset(node, name);
  for (const [name, value] of Object.entries(wanted.attributes)) {
    if (value == null || value === false || node.given[name] === value) continue;
    node.given[name] = value;
    node.setAttribute(name, value === true ? "" : written(value));
  }
  // What a library draws in there is its own.
  if (!wanted.attributes["data-foreign"]) patch(node, wanted.children);
}

function unset(node, name) {
  delete node.given[name];
  node.removeAttribute(name);
}

export function panel(id, title, note, ...children) {
  patch(
    document.getElementById(id),
    h("div", { class: "head" }, h("h2", { id: `${id}-title` }, title), note),
    ...children,
  );
}

// A button that stays pressed; `data-do` names what it does (main.js), `name` to what.
export function toggle(action, label, isOn, name) {
  return h("button", { class: "toggle", type: "button", "data-do": action, "data-name": name, "data-key": `${action} ${name ?? ""}`, "aria-pressed": String(isOn) }, label);
}
