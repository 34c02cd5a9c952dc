// Memory of devices and page-locked memory of the host, both in ordinary memory, and copies between them on streams.
#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace {

enum class Kind { device, allocated_host, registered_host };
struct Block {
    size_t bytes;
    Kind kind;
    int device;
};
struct Usage {
    size_t used = 0, peak = 0;
};

std::mutex mutex;
std::map<const char*, Block> blocks;  // by first byte
std::map<int, Usage> of_device;
Usage of_host;  // page-locked

void add(Usage& usage, size_t bytes) {
    usage.used += bytes;
    usage.peak = std::max(usage.peak, usage.used);
}

// The block that holds an address; null: memory that CUDA does not know. Needs the mutex.
const Block* find(const void* address) {
    auto next = blocks.upper_bound(static_cast<const char*>(address));
    if (next == blocks.begin()) return nullptr;
    --next;
    return static_cast<const char*>(address) < next->first + next->second.bytes ? &next->second : nullptr;
}

bool is_known(const void* address) {
    std::lock_guard lock(mutex);
    return find(address) != nullptr;
}

cudaError_t allocate(void** result, size_t bytes, Kind kind) {
    std::lock_guard lock(mutex);
    const int device = fake::current_device();
    Usage& usage = kind == Kind::device ? of_device[device] : of_host;
    if (kind == Kind::device && usage.used + bytes > fake::device_bytes()) return fake::fail(cudaErrorMemoryAllocation);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return fake::fail(cudaErrorMemoryAllocation);
    if (kind == Kind::device) std::memset(memory, 0xff, bytes);  // NaN: what nobody has written must not look like zeros
    blocks[static_cast<char*>(memory)] = {bytes, kind, device};
    add(usage, bytes);
    *result = memory;
    return cudaSuccess;
}

cudaError_t free_block(void* memory) {
    if (memory == nullptr) return cudaSuccess;
    fake::wait_for_device();  // as CUDA does: nothing uses the memory any more
    std::lock_guard lock(mutex);
    const auto found = blocks.find(static_cast<char*>(memory));
    if (found == blocks.end() || found->second.kind == Kind::registered_host) return fake::fail(cudaErrorInvalidValue);
    const Block block = found->second;
    (block.kind == Kind::device ? of_device[block.device] : of_host).used -= block.bytes;
    blocks.erase(found);
    munmap(memory, block.bytes);
    return cudaSuccess;
}

// Copy `rows` rows. Pageable memory of the host is read at once, which the driver may do after waiting for the stream, and
// written before the call returns.
cudaError_t copy(
    void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows, cudaStream_t stream) {
    if (width == 0 || rows == 0) return cudaSuccess;
    std::shared_ptr<std::string> staged;
    if (!is_known(from)) {
        fake::wait_for_stream(stream);
        staged = std::make_shared<std::string>(static_cast<const char*>(from), (rows - 1) * from_pitch + width);
        from = staged->data();
    }
    fake::put(stream, [=, keeps = staged] {
        for (size_t row = 0; row < rows; ++row)
            std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
        return true;
    });
    if (!is_known(to)) fake::wait_for_stream(stream);
    return cudaSuccess;
}

cudaError_t set(void* memory, int value, size_t bytes, cudaStream_t stream) {
    fake::put(stream, [=] {
        std::memset(memory, value, bytes);
        return true;
    });
    return cudaSuccess;
}

}  // namespace

// ---- for Python

EXPORTED size_t fake_cuda_device_peak(int device) {
    std::lock_guard lock(mutex);
    return of_device[device].peak;
}
EXPORTED size_t fake_cuda_page_locked() {
    std::lock_guard lock(mutex);
    return of_host.used;
}

// ---- CUDA

EXPORTED cudaError_t cudaMalloc(void** memory, size_t bytes) {
    NEEDS_DEVICE;
    return allocate(memory, bytes, Kind::device);
}
EXPORTED cudaError_t cudaFree(void* memory) {
    NEEDS_DEVICE;
    return free_block(memory);
}
EXPORTED cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
    NEEDS_DEVICE;
    return allocate(memory, bytes, Kind::allocated_host);
}
EXPORTED cudaError_t cudaMallocHost(void** memory, size_t bytes) { return cudaHostAlloc(memory, bytes, 0); }
EXPORTED cudaError_t cudaFreeHost(void* memory) {
    NEEDS_DEVICE;
    return free_block(memory);
}
EXPORTED cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
    NEEDS_DEVICE;
    std::lock_guard lock(mutex);
    if (find(memory)) return fake::fail(cudaErrorHostMemoryAlreadyRegistered);
    blocks[static_cast<char*>(memory)] = {bytes, Kind::registered_host, fake::current_device()};
    add(of_host, bytes);
    return cudaSuccess;
}
EXPORTED cudaError_t cudaHostUnregister(void* memory) {
    NEEDS_DEVICE;
    fake::wait_for_device();
    std::lock_guard lock(mutex);
    const auto found = blocks.find(static_cast<char*>(memory));
    if (found == blocks.end() || found->second.kind != Kind::registered_host)
        return fake::fail(cudaErrorHostMemoryNotRegistered);
    of_host.used -= found->second.bytes;
    blocks.erase(found);
    return cudaSuccess;
}
EXPORTED cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
    *device = host;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    std::lock_guard lock(mutex);
    std::memset(attributes, 0, sizeof *attributes);
    const Block* block = find(address);
    const bool on_device = block && block->kind == Kind::device;
    attributes->type =
        !block ? cudaMemoryTypeUnregistered : on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = block ? block->device : -2;  // as CUDA says it of memory that it does not know
    attributes->devicePointer = block ? const_cast<void*>(address) : nullptr;
    attributes->hostPointer = on_device ? nullptr : const_cast<void*>(address);
    return cudaSuccess;
}
EXPORTED cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    NEEDS_DEVICE;
    std::lock_guard lock(mutex);
    *total = fake::device_bytes();
    *free = *total - of_device[fake::current_device()].used;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    NEEDS_DEVICE;
    return copy(to, bytes, from, bytes, bytes, 1, stream);
}
EXPORTED cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    NEEDS_DEVICE;
    return copy(to, bytes, from, bytes, bytes, 1, stream);
}
EXPORTED cudaError_t cudaMemcpy2DAsync(
    void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows, cudaMemcpyKind,
    cudaStream_t stream) {
    NEEDS_DEVICE;
    return copy(to, to_pitch, from, from_pitch, width, rows, stream);
}
EXPORTED cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    NEEDS_DEVICE;
    copy(to, bytes, from, bytes, bytes, 1, nullptr);
    fake::wait_for_stream(nullptr);
    return cudaSuccess;
}
EXPORTED cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
    NEEDS_DEVICE;
    return set(memory, value, bytes, stream);
}
EXPORTED cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
    NEEDS_DEVICE;
    set(memory, value, bytes, nullptr);
    fake::wait_for_stream(nullptr);
    return cudaSuccess;
}
