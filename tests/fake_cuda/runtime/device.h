// What the files of the fake CUDA runtime share: settings, errors, and work on streams.
//
// host thread --put--> a stream's queue --the device thread, late and in an order that a seed sets--> done
//
// Work runs while a host or a peer waits for any of it, or after 20 ms without a call. Only events order work of different
// streams, as on a GPU. So whatever forgets to wait sees memory before the work, or after other work has changed it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace fake {

struct Stream;

// A place in a stream: reached once the stream has done that number of tasks.
struct Place {
    Stream* stream = nullptr;
    long number = 0;
    bool reached() const;  // needs the device's lock
};

// A piece of work on a stream. Returns false where it waits for another process: the stream tries it again.
using Work = std::function<bool()>;

// The number in an environment variable, or `otherwise`.
long setting(const char* name, long otherwise);

// Number of devices that this process sees, and bytes of each; CUDA_VISIBLE_DEVICES hides the others.
constexpr int MAX_DEVICES = 16;
int device_count();
size_t device_bytes();
int current_device();

// Store an error as CUDA's last one of this thread, and return it.
cudaError_t fail(cudaError_t error);

// Note that this process uses CUDA. False, with a line on stderr, in a process forked from one that used it.
bool usable();

// Queue work on a stream. A stream does its work in order.
Place put(cudaStream_t stream, Work work);

// Let the host wait, without Python's lock, until a stream, or all streams, have done what is queued now.
void wait_for_stream(cudaStream_t stream);
void wait_for_device();

// Of communicators: places in this process's streams that peers wait for. The device thread asks; it holds its lock.
std::vector<Place> wanted_by_peers();

// Releases Python's global lock, if this thread holds it, while the host waits: results are computed in Python.
class WithoutPythonLock {
    void* state_;

public:
    WithoutPythonLock();
    ~WithoutPythonLock();
};

}  // namespace fake

// Return from a CUDA function that needs a device, where this process may not use it.
#define NEEDS_DEVICE \
    if (!fake::usable()) return fake::fail(cudaErrorInitializationError)
