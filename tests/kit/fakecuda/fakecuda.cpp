// Devices of type "cuda" over CPU memory, for a CPU build of torch: streams are queues that run as late as possible.
//
// What was ordered runs when somebody waits for it, or when a schedule says so. So a buffer that is read before its copy
// was waited for holds poison, every time. Each wait of the host is written into a log with its thread and its reason;
// what two streams do to the same bytes without an order between them is written down as a hazard.
#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

using namespace at;

namespace {

constexpr DeviceType CUDA_TYPE = DeviceType::CUDA;
constexpr int DEVICES = 2;
constexpr int POOL = 14;  // streams of a device beside its default one; then they are given out again, as torch does
constexpr int QUEUES = DEVICES * (1 + POOL);
constexpr uint64_t POLLS = 200;  // after so many queries of one event the device has got there by itself
constexpr size_t ACCESSES = 64;  // of one block that are remembered for the race detector

enum Schedule { LATE = 0, AT_ONCE = 1, RANDOM = 2 };

// ---- streams, clocks and blocks of memory -------------------------------------------------------------------------

using Clock = std::array<uint64_t, QUEUES>;  // per queue: how much of it is certain to be done

struct Span { char* low; char* high; bool is_write; };

struct Access { int queue; uint64_t sequence; Span span; };

struct Block {
  char* memory;
  size_t size;
  int queue;  // of the stream that it was allocated for
  bool is_pinned;
  bool is_freed = false;
  std::map<int, int> pending{};  // queue -> tasks in it that use the block
  std::set<int> recorded{};      // queues that `record_stream` has named
  std::deque<Access> accesses{};
};

struct Event { int queue = -1; uint64_t sequence = 0; Clock clock{}; uint64_t polls = 0; };

struct Task { std::function<void()> run; std::vector<Block*> blocks; };

struct Queue { std::deque<Task> tasks; uint64_t ordered = 0, done = 0; Clock clock{}; Schedule schedule = LATE; };

struct Wait { uint64_t thread; std::string reason; };

// Never destroyed: tensors may be freed after this library's destructors have run.
template <typename T> T& immortal() { return *new T{}; }

std::recursive_mutex& mutex = immortal<std::recursive_mutex>();
using Lock = std::lock_guard<std::recursive_mutex>;
auto& queues = immortal<std::array<Queue, QUEUES>>();  // the default streams of the devices first
std::array<int, DEVICES> streams_made{};
auto& blocks = immortal<std::map<char*, Block*>>();  // by address, of devices and pinned
auto& waits = immortal<std::vector<Wait>>();
auto& hazards = immortal<std::vector<std::string>>();
auto& operators = immortal<std::map<std::string, uint64_t>>();
std::atomic<uint64_t> launches{0}, bytes_up{0}, bytes_down{0}, bytes_across{0};
std::atomic<uint64_t> device_bytes{0}, device_peak{0}, pinned_bytes{0}, pinned_allocations{0};
uint64_t random_state = 1;

thread_local std::array<int, DEVICES> current_queue = {0, 1};
thread_local DeviceIndex current_device = 0;
thread_local bool is_wait_forbidden = false;
thread_local Clock host_clock{};  // what this thread has waited for

uint64_t draw() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

// Stream 0 of each device is its default one; the others have their queue's number.
int index_of_queue(int queue) { return queue < DEVICES ? queue : (queue - DEVICES) / POOL; }
int queue_of(const c10::Stream& stream) { return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id()); }
c10::Stream stream_of(int queue) {
  return c10::Stream(c10::Stream::UNSAFE, Device(CUDA_TYPE, index_of_queue(queue)), queue < DEVICES ? 0 : queue);
}

void learn(Clock& clock, const Clock& news) {
  for (int queue = 0; queue < QUEUES; ++queue) clock[queue] = std::max(clock[queue], news[queue]);
}

Block* block_of(const void* address) {
  char* place = static_cast<char*>(const_cast<void*>(address));
  auto next = blocks.upper_bound(place);
  if (next == blocks.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return place < block->memory + std::max<size_t>(block->size, 1) ? block : nullptr;
}

void destroy(Block* block) {
  blocks.erase(block->memory);
  free(block->memory);
  delete block;
}

void run_until(int number, uint64_t sequence) {
  Queue& queue = queues[number];
  while (queue.done < sequence && !queue.tasks.empty()) {
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    task.run();
    ++queue.done;
    for (Block* block : task.blocks)
      if (--block->pending[number] == 0) {
        block->pending.erase(number);
        if (block->is_freed && block->pending.empty()) destroy(block);
      }
  }
}

void host_waits(const std::string& reason, int number, uint64_t sequence) {
  waits.push_back({static_cast<uint64_t>(pthread_self()), reason});
  TORCH_CHECK(!is_wait_forbidden, "fakecuda: the host waits for the device where it must not: ", reason);
  Clock reached = queues[number].clock;
  reached[number] = sequence;
  learn(host_clock, reached);
  run_until(number, sequence);
}

void wait_for_current(const std::string& reason, int device) {
  Lock lock(mutex);
  int number = current_queue[device];
  host_waits(reason, number, queues[number].ordered);
}

void queue_waits(int number, const Event& event) {
  Queue& queue = queues[number];
  ++queue.ordered;
  learn(queue.clock, event.clock);
  queue.clock[event.queue] = std::max(queue.clock[event.queue], event.sequence);
  queue.clock[number] = queue.ordered;
  queue.tasks.push_back(Task{[event] { run_until(event.queue, event.sequence); }, {}});
}

// An access conflicts with an earlier one of another queue that this queue does not know to be done.
void note_access(Block* block, const Access& access, const char* name) {
  const Span& span = access.span;
  for (const Access& before : block->accesses) {
    bool is_shared = before.span.low < span.high && span.low < before.span.high;
    if (before.queue == access.queue || !is_shared || !(before.span.is_write || span.is_write)) continue;
    if (queues[access.queue].clock[before.queue] >= before.sequence) continue;
    std::ostringstream text;
    text << "race: " << name << (span.is_write ? " writes" : " reads") << " on queue " << access.queue
         << " what queue " << before.queue << (before.span.is_write ? " writes" : " reads");
    hazards.push_back(text.str());
    break;
  }
  if (block->accesses.size() == ACCESSES) block->accesses.pop_front();
  block->accesses.push_back(access);
}

// Put work into the current stream of a device.
void order(int device, const char* name, std::function<void()> run, const std::vector<Span>& spans) {
  Lock lock(mutex);
  int number = current_queue[device];
  Queue& queue = queues[number];
  ++launches;
  ++operators[name];
  uint64_t sequence = ++queue.ordered;
  learn(queue.clock, host_clock);  // what the host has waited for is done
  queue.clock[number] = sequence;
  Task task{std::move(run), {}};
  for (const Span& span : spans)
    if (Block* block = block_of(span.low)) {
      if (block->is_freed) hazards.push_back(std::string("freed: ") + name + " uses memory that was given back");
      ++block->pending[number];
      task.blocks.push_back(block);
      note_access(block, {number, sequence, span}, name);
    }
  queue.tasks.push_back(std::move(task));
  if (queue.schedule == AT_ONCE) run_until(number, sequence);
  if (queue.schedule == RANDOM) {
    int lucky = static_cast<int>(draw() % QUEUES);
    run_until(lucky, queues[lucky].done + draw() % 4);
  }
}

// ---- memory -------------------------------------------------------------------------------------------------------

void release(void* address) {
  Lock lock(mutex);
  auto entry = blocks.find(static_cast<char*>(address));
  if (entry == blocks.end()) return;
  Block* block = entry->second;
  (block->is_pinned ? pinned_bytes : device_bytes) -= block->size;
  if (!block->is_pinned)
    // The next tensor of its stream gets the memory.
    for (const Access& access : block->accesses)
      if (!block->recorded.count(access.queue) && queues[block->queue].clock[access.queue] < access.sequence && queues[access.queue].done < access.sequence) {
        hazards.push_back("freed: memory of queue " + std::to_string(block->queue) + " is still used by queue " + std::to_string(access.queue));
        break;
      }
  block->is_freed = true;
  if (block->pending.empty()) {
    memset(block->memory, 0x7f, block->size);
    destroy(block);
  }
}

void* acquire(size_t size, bool is_pinned) {
  Lock lock(mutex);
  void* memory = nullptr;
  TORCH_CHECK(!posix_memalign(&memory, 64, std::max<size_t>(size, 64)), "fakecuda: no memory");
  memset(memory, 0xff, size);  // NaN, until something is written
  blocks[static_cast<char*>(memory)] = new Block{static_cast<char*>(memory), size, current_queue[current_device], is_pinned};
  (is_pinned ? pinned_bytes : device_bytes) += size;
  if (is_pinned) ++pinned_allocations;
  if (device_bytes > device_peak) device_peak = device_bytes.load();
  return memory;
}

struct DeviceAllocator final : c10::Allocator {
  DataPtr allocate(size_t size) override {
    void* memory = size ? acquire(size, false) : nullptr;
    return {memory, memory, &release, Device(CUDA_TYPE, current_device)};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "fakecuda: copy_data"); }
} device_allocator;

struct PinnedAllocator final : at::HostAllocator {
  DataPtr allocate(size_t size) override {
    void* memory = size ? acquire(size, true) : nullptr;
    return {memory, memory, &release, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override { memcpy(target, source, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_allocator;
REGISTER_HOST_ALLOCATOR(kCUDA, &pinned_allocator)

struct RegisterAllocator { RegisterAllocator() { c10::SetAllocator(CUDA_TYPE, &device_allocator, 0); } } register_allocator;

bool is_pinned_memory(const void* address) {
  Lock lock(mutex);
  Block* block = block_of(address);
  return block && block->is_pinned;
}

}  // namespace

// ---- what torch asks a device for ---------------------------------------------------------------------------------

namespace at {

struct FakeCudaHooks final : CUDAHooksInterface {
  FakeCudaHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  int getNumGPUs() const override { return DEVICES; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(::current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return std::exchange(::current_device, device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned_memory(address); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void* address) const override {
    Lock lock(mutex);
    Block* block = block_of(address);
    return Device(CUDA_TYPE, block ? index_of_queue(block->queue) : 0);
  }
};
using CUDAHooks = FakeCudaHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeCudaHooks)

}  // namespace at

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return CUDA_TYPE; }
  Device exchangeDevice(Device device) const override {
    Device before(CUDA_TYPE, current_device);
    if (device.has_index()) current_device = device.index();
    return before;
  }
  Device getDevice() const override { return Device(CUDA_TYPE, current_device); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override { if (device.has_index()) current_device = device.index(); }
  static int index_of(Device device) { return device.has_index() ? device.index() : current_device; }
  c10::Stream getStream(Device device) const override { return stream_of(current_queue[index_of(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return stream_of(index_of(device)); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return next_stream(index_of(device)); }
  c10::Stream getNewStream(Device device, int) const override { return next_stream(index_of(device)); }
  static c10::Stream next_stream(int device) {
    Lock lock(mutex);
    return stream_of(DEVICES + device * POOL + streams_made[device]++ % POOL);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current_queue[stream.device_index()], queue_of(stream)));
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Event;
    int number = queue_of(stream);
    *static_cast<Event*>(*event) = Event{number, queues[number].ordered, queues[number].clock};
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(mutex);
    if (event) queue_waits(queue_of(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* handle) const override {
    Lock lock(mutex);
    if (!handle) return true;
    Event& event = *static_cast<Event*>(handle);
    Queue& queue = queues[event.queue];
    if (queue.schedule == RANDOM) run_until(event.queue, queue.done + draw() % 4);
    if (++event.polls >= POLLS) run_until(event.queue, event.sequence);
    if (queue.done < event.sequence) return false;
    learn(host_clock, event.clock);
    host_clock[event.queue] = std::max(host_clock[event.queue], event.sequence);
    return true;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    return queues[queue_of(stream)].tasks.empty();
  }
  void synchronizeEvent(void* handle) const override {
    Lock lock(mutex);
    if (!handle) return;
    Event& event = *static_cast<Event*>(handle);
    host_waits("event.synchronize", event.queue, event.sequence);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    host_waits("stream.synchronize", queue_of(stream), queues[queue_of(stream)].ordered);
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Lock lock(mutex);
    for (int number = 0; number < QUEUES; ++number)
      if (index_of_queue(number) == device) host_waits("device.synchronize", number, queues[number].ordered);
  }
  void recordDataPtrOnStream(const DataPtr& memory, const c10::Stream& stream) const override {
    Lock lock(mutex);
    if (Block* block = block_of(memory.get())) block->recorded.insert(queue_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// ---- tensors and copies -------------------------------------------------------------------------------------------

bool is_on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == CUDA_TYPE; }

// A tensor without its storage: what is ordered keeps no memory alive, as on a device.
struct View { char* memory = nullptr; std::vector<int64_t> sizes, strides; ScalarType dtype = kFloat; };

View view_of(const Tensor& tensor) {
  return {const_cast<char*>(static_cast<const char*>(tensor.const_data_ptr())), tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

Tensor on_cpu(const View& view) { return at::from_blob(view.memory, view.sizes, view.strides, TensorOptions().dtype(view.dtype)); }

Span span_of(const Tensor& tensor, bool is_write) {
  char* low = const_cast<char*>(static_cast<const char*>(tensor.const_data_ptr()));
  if (!tensor.numel()) return {low, low, is_write};
  int64_t last = 0;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) last += (tensor.size(axis) - 1) * tensor.stride(axis);
  return {low, low + (last + 1) * tensor.element_size(), is_write};
}

Tensor empty_strided_on_device(IntArrayRef sizes, IntArrayRef strides, std::optional<ScalarType> dtype, std::optional<Layout>,
                               std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, c10::DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}

Tensor empty_on_device(IntArrayRef sizes, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
                       std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &device_allocator, c10::DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}

const Tensor& resize_on_device(const Tensor& self, IntArrayRef sizes, std::optional<MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  size_t need = (self.numel() + self.storage_offset()) * self.element_size();
  if (need > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    self.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(device_allocator.allocate(need));
    self.storage().unsafeGetStorageImpl()->set_nbytes(need);
  }
  return self;
}

void order_copy(int device, const char* name, const Tensor& target, const Tensor& source) {
  View to = view_of(target), from = view_of(source);
  order(device, name, [to, from] { on_cpu(to).copy_(on_cpu(from)); }, {span_of(source, false), span_of(target, true)});
}

// On the source's stream, which the target's waits for, and the other way round.
void copy_across(const Tensor& target, const Tensor& source) {
  Lock lock(mutex);
  bytes_across += source.nbytes();
  int to = current_queue[target.device().index()], from = current_queue[source.device().index()];
  if (to != from) queue_waits(from, {to, queues[to].ordered, queues[to].clock});
  order_copy(source.device().index(), "copy_", target, source);
  if (to != from) queue_waits(to, {from, queues[from].ordered, queues[from].clock});
}

void copy_between(const Tensor& target, const Tensor& source, bool is_down, bool non_blocking) {
  const Tensor& host = is_down ? target : source;
  int device = (is_down ? source : target).device().index();
  bool is_pinned = is_pinned_memory(host.const_data_ptr());
  (is_down ? bytes_down : bytes_up) += source.nbytes();
  std::ostringstream reason;
  reason << (is_down ? "D2H" : "H2D") << (is_pinned ? " pinned" : " pageable") << (non_blocking ? " non_blocking " : " blocking ") << source.nbytes() << " B";
  bool is_waiting = !(is_pinned && non_blocking);
  if (is_waiting && is_wait_forbidden) wait_for_current(reason.str(), device);  // raises, before anything is ordered
  if (is_down && !is_waiting) memset(target.mutable_data_ptr(), 0xff, target.nbytes());  // who reads now reads NaN
  if (!is_down && !is_pinned) {  // staged: the bytes are taken now
    Tensor staged = source.clone();
    View to = view_of(target);
    order(device, "memcpy", [to, staged] { on_cpu(to).copy_(staged); }, {span_of(target, true)});
  } else {
    order_copy(device, "memcpy", target, source);
  }
  if (is_waiting) wait_for_current(reason.str(), device);
}

// As ATen/native/cuda/Copy.cu: which copies need temporaries, where types are converted, and when the host waits.
Tensor& copy_on_device(Tensor& self, const Tensor& values, bool non_blocking) {
  if (!self.numel()) return self;
  Tensor source = values.expand(self.sizes());
  if (is_on_device(self) && is_on_device(source)) {
    copy_across(self, source);
    return self;
  }
  bool is_down = is_on_device(source);
  bool is_same_type = self.scalar_type() == source.scalar_type();
  if (is_same_type && self.is_contiguous() && source.is_contiguous()) {
    copy_between(self, source, is_down, non_blocking);
    return self;
  }
  Tensor to, from;
  if (is_down == non_blocking) {  // the source converts: on the device if not blocking, on the host if blocking
    to = self.is_contiguous() ? self : at::empty_like(self, MemoryFormat::Contiguous);
    from = source.to(self.scalar_type()).contiguous();
  } else {
    to = self.is_contiguous() && is_same_type ? self : at::empty(self.sizes(), self.options().dtype(source.scalar_type()));
    from = source.contiguous();
  }
  copy_between(to, from, is_down, non_blocking);
  if (!to.is_same(self)) self.copy_(to, non_blocking);
  return self;
}

Scalar item_on_device(const Tensor& self) {
  wait_for_current("item()", self.device().index());
  return on_cpu(view_of(self)).item();
}

void record_stream_on_device(Tensor& self, c10::Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

// ---- every other operator: shapes by its meta kernel, values later by its CPU kernel on the same memory -----------

using Replace = std::function<Tensor(const Tensor&)>;

IValue mapped(const IValue& value, const Replace& replace, Device device) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(replace(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> tensors;
    for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor.defined() ? replace(tensor) : tensor);
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> tensors;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      tensors.push_back(tensor && tensor->defined() ? std::optional<Tensor>(replace(*tensor)) : tensor);
    return tensors;
  }
  return value.isDevice() ? IValue(device) : value;
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& handle, std::vector<IValue> inputs) : operator_(handle), inputs_(std::move(inputs)) {
    const auto& schema = operator_.schema();
    const std::string overload = schema.overload_name();
    name_ = schema.operator_name().name.substr(6) + (overload.empty() ? "" : "." + overload);
    for (size_t at = 0; at < inputs_.size(); ++at) {
      const auto* alias = schema.arguments()[at].alias_info();
      mapped(inputs_[at], [&](const Tensor& tensor) { add(tensor, alias && alias->isWrite()); return tensor; }, Device(CUDA_TYPE));
    }
  }

  std::vector<IValue> run() {
    std::vector<IValue> shapes;
    if (is_in_place()) shapes.resize(operator_.schema().returns().size());
    else if (!find_shapes(shapes)) return run_now();
    std::vector<std::pair<View, size_t>> targets;
    std::vector<IValue> results;
    for (size_t at = 0; at < shapes.size(); ++at) {
      const IValue* input = alias_of(at);
      results.push_back(input ? *input : mapped(shapes[at], [&](const Tensor& shape) {
        if (!shape.is_meta()) return shape;
        Tensor target = at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(Device(CUDA_TYPE, device_)));
        targets.emplace_back(view_of(target), at);
        spans_.push_back(span_of(target, true));
        return target;
      }, Device(CUDA_TYPE, device_)));
    }
    order(device_, interned(name_), [compute = computation(), targets] {
      torch::jit::Stack stack = compute();
      std::map<size_t, size_t> next;
      for (const auto& [target, at] : targets)
        on_cpu(target).copy_(stack[at].isTensor() ? stack[at].toTensor() : stack[at].toTensorVector()[next[at]++]);
    }, spans_);
    return results;
  }

 private:
  void add(const Tensor& tensor, bool is_write) {
    if (is_on_device(tensor)) {
      if (views_.empty() || device_ < 0) device_ = tensor.device().index();
      views_.push_back(view_of(tensor));
      numbers_.emplace_back();
      spans_.push_back(span_of(tensor, is_write));
      return;
    }
    bool is_index = !name_.rfind("index", 0) || !name_.rfind("_index", 0);
    TORCH_CHECK(!tensor.dim() || is_index, "Expected all tensors to be on the same device, but found one on the CPU of shape ", tensor.sizes(), " in ", name_);
    Tensor number = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) number.unsafeGetTensorImpl()->set_wrapped_number(true);
    views_.emplace_back();
    numbers_.push_back(number);
  }

  // Whether all that it writes is there. Most calls are such, and torch finds shapes in slow Python.
  bool is_in_place() const {
    for (size_t at = 0; at < operator_.schema().returns().size(); ++at) {
      const IValue* input = alias_of(at);
      if (!input || !input->isTensor() || !input->toTensor().numel()) return false;
    }
    return true;
  }

  bool find_shapes(std::vector<IValue>& shapes) {
    std::vector<std::pair<Tensor, Tensor>> twins;
    torch::jit::Stack stack;
    try {
      for (const IValue& input : inputs_)
        stack.push_back(mapped(input, [&](const Tensor& tensor) {
          for (const auto& [real, twin] : twins) if (real.is_same(tensor)) return twin;
          if (!is_on_device(tensor) && !tensor.dim()) return tensor;  // a number
          Tensor twin = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kMeta).pinned_memory(false));
          twins.emplace_back(tensor, twin);
          return twin;
        }, Device(kMeta)));
      operator_.callBoxed(&stack);
    } catch (const std::exception&) {
      return false;  // no meta kernel, or a shape that depends on values
    }
    shapes.assign(stack.begin(), stack.end());
    for (const auto& [real, twin] : twins)
      if (is_on_device(real) && real.sizes() != twin.sizes()) {  // an `out=` of another size
        real.resize_(twin.sizes());
        refresh(real);
      }
    return true;
  }

  // Its views and spans again, after its memory has changed.
  void refresh(const Tensor& resized) {
    size_t at = 0, place = 0;
    for (const IValue& input : inputs_)
      mapped(input, [&](const Tensor& tensor) {
        if (is_on_device(tensor)) {
          if (tensor.is_same(resized)) { views_[at] = view_of(tensor); spans_[place] = span_of(tensor, spans_[place].is_write); }
          ++place;
        }
        ++at;
        return tensor;
      }, Device(CUDA_TYPE));
  }

  // The host has to look at the values before it knows the shapes.
  std::vector<IValue> run_now() {
    wait_for_current("shape of " + name_, std::max(device_, 0));
    torch::jit::Stack stack = computation()();
    std::vector<IValue> results;
    for (size_t at = 0; at < stack.size(); ++at) {
      const IValue* input = alias_of(at);
      results.push_back(input ? *input : mapped(stack[at], [&](const Tensor& value) {
        Tensor target = at::empty_strided(value.sizes(), value.strides(), value.options().device(Device(CUDA_TYPE, std::max(device_, 0))));
        on_cpu(view_of(target)).copy_(value);
        return target;
      }, Device(CUDA_TYPE)));
    }
    return results;
  }

  // The CPU kernel on views of the tensors' memory.
  std::function<torch::jit::Stack()> computation() const {
    std::vector<IValue> shells;  // the inputs without storages
    for (const IValue& input : inputs_) shells.push_back(mapped(input, [](const Tensor&) { return at::empty({0}, kCPU); }, Device(kCPU)));
    return [handle = operator_, shells, views = views_, numbers = numbers_] {
      c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
      size_t at = 0;
      torch::jit::Stack stack;
      for (const IValue& shell : shells)
        stack.push_back(mapped(shell, [&](const Tensor&) {
          Tensor tensor = numbers[at].defined() ? numbers[at] : on_cpu(views[at]);
          ++at;
          return tensor;
        }, Device(kCPU)));
      handle.callBoxed(&stack);
      return stack;
    };
  }

  const IValue* alias_of(size_t result) const {
    const auto& schema = operator_.schema();
    const auto* alias = schema.returns()[result].alias_info();
    for (size_t at = 0; alias && at < inputs_.size(); ++at) {
      const auto* other = schema.arguments()[at].alias_info();
      if (other && *other == *alias) return &inputs_[at];
    }
    return nullptr;
  }

  static const char* interned(const std::string& name) {
    Lock lock(mutex);
    static std::set<std::string> names;
    return names.insert(name).first->c_str();
  }

  c10::OperatorHandle operator_;
  std::vector<IValue> inputs_;
  std::string name_;
  int device_ = -1;               // of the first tensor on one
  std::vector<View> views_;       // of each tensor in order; empty for those on the CPU
  std::vector<Tensor> numbers_;   // of each tensor in order: a copy of one on the CPU
  std::vector<Span> spans_;       // of the tensors on the device, and of the results
};

void fallback(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const size_t count = handle.schema().arguments().size();
  Call call(handle, std::vector<IValue>(stack->end() - count, stack->end()));
  std::vector<IValue> results = call.run();
  stack->erase(stack->end() - count, stack->end());
  stack->insert(stack->end(), results.begin(), results.end());
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty_on_device);
  library.impl("empty_strided", empty_strided_on_device);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", resize_on_device);
  library.impl("copy_", copy_on_device);
  library.impl("_local_scalar_dense", item_on_device);
  library.impl("record_stream", record_stream_on_device);
}

}  // namespace

// ---- for the tests: see fake_device.py ----------------------------------------------------------------------------

extern "C" {

const char* fakecuda_waits() {
  static std::string text;
  Lock lock(mutex);
  text.clear();
  for (const Wait& wait : waits) text += std::to_string(wait.thread) + " " + wait.reason + "\n";
  return text.c_str();
}

const char* fakecuda_hazards() {
  static std::string text;
  Lock lock(mutex);
  text.clear();
  for (const std::string& hazard : hazards) text += hazard + "\n";
  return text.c_str();
}

const char* fakecuda_operators() {
  static std::string text;
  Lock lock(mutex);
  text.clear();
  for (const auto& [name, count] : operators) text += name + " " + std::to_string(count) + "\n";
  return text.c_str();
}

uint64_t fakecuda_count(int counter) {
  const std::atomic<uint64_t>* counters[] = {&launches, &bytes_up, &bytes_down, &bytes_across, &device_bytes, &device_peak, &pinned_bytes, &pinned_allocations};
  return *counters[counter];
}

void fakecuda_reset() {
  Lock lock(mutex);
  waits.clear();
  hazards.clear();
  operators.clear();
  launches = bytes_up = bytes_down = bytes_across = pinned_allocations = 0;
  device_peak = device_bytes.load();
}

void fakecuda_schedule(int main_streams, int other_streams, uint64_t seed) {
  Lock lock(mutex);
  for (int number = 0; number < QUEUES; ++number)
    queues[number].schedule = static_cast<Schedule>(number < DEVICES ? main_streams : other_streams);
  random_state = seed * 2 + 1;
}

void fakecuda_forbid_waits(int is_forbidden) { is_wait_forbidden = is_forbidden; }

int fakecuda_devices() { return DEVICES; }

// `UntypedStorage.resize_`, which a CPU build lacks: the values are lost, as FSDP2 wants to have it.
void fakecuda_resize(void* storage, size_t size) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  c10::DeviceGuard guard(impl->device());
  impl->set_data_ptr_noswap(device_allocator.allocate(size));
  impl->set_nbytes(size);
}

}
