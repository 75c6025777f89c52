// Elements described as plain values, and put into the page by changing only what differs: focus, selection and scroll
// positions stay, and nothing grows. Texts go in as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "line", "path", "text", "title", "circle", "polyline"]);

// A described element: h("p", {class: "x"}, "text", h("b", {}, "more")). Attributes that are null or false are left out;
// lists among the children are flattened, null and false left out.
export function h(tag, attributes, ...children) {
  return { tag, attributes: attributes || {}, children: children.flat(9).filter((one) => one != null && one !== false) };
}

// Make the children of `parent` those that are described.
export function patch(parent, ...children) {
  const wanted = children.flat(9).filter((one) => one != null && one !== false);
  wanted.forEach((one, at) => {
    const there = parent.childNodes[at];
    if (!there) parent.append(made(one, parent));
    else if (!fits(there, one)) there.replaceWith(made(one, parent));
    else if (typeof one === "object") update(there, one);
    else if (there.data !== String(one)) there.data = String(one);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

function fits(node, wanted) {
  if (typeof wanted !== "object") return node.nodeType === Node.TEXT_NODE;
  return node.described === wanted.tag && (node.getAttribute("data-key") || null) === (wanted.attributes["data-key"] || null);
}

function made(wanted, parent) {
  if (typeof wanted !== "object") return document.createTextNode(String(wanted));
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
    if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  // What a library draws in there is its own.
  if (!wanted.attributes["data-foreign"]) patch(node, wanted.children);
  if ("value" in wanted.attributes && node.value !== wanted.attributes.value) node.value = wanted.attributes.value;
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

// A button that stays pressed; `data-do` names what it does (main.js).
export function toggle(action, label, isOn) {
  return h("button", { class: "toggle", type: "button", "data-do": action, "data-key": action, "aria-pressed": String(isOn) }, label);
}
