// Streams, events, and the one thread that does all their work.
//
// A seed sets which ready stream goes on (`Order`): the device's default stream, where mmtrain computes, before all others,
// or after them; or the one of highest priority, which is drawn anew now and then (Burckhardt et al., "A randomized
// scheduler with probabilistic guarantees of finding bugs", ASPLOS 2010); or only what somebody waits for.
#include "device.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace fake {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto PATIENCE = std::chrono::milliseconds(20);  // without a call of the host: then queued work goes on
constexpr auto TICK = std::chrono::microseconds(200);     // between two looks at other processes

struct Task {
    Work work;                            // none: only waits or is recorded
    Place awaited;                        // that must be reached before
    std::shared_ptr<double> finished_at;  // milliseconds, for events; may be null
};

}  // namespace

struct Stream {
    std::deque<Task> tasks;
    long put = 0, done = 0;  // tasks
    double priority = 0;
    long tried = -1;  // round in which its head could not go on

    bool ready(long round) const { return !tasks.empty() && tried != round && tasks.front().awaited.reached(); }
};

bool Place::reached() const { return stream == nullptr || stream->done >= number; }

namespace {

struct Event {
    Place place;
    std::shared_ptr<double> finished_at;
};

enum class Rule { default_stream_first, default_stream_last, priorities, lazy };

// How the work of a process is ordered. Eight seeds in a row hold each rule, on each rank. Memory that was freed while a
// message waits to be sent shows only under the two rules that have three seeds.
struct Order {
    std::mt19937 random;
    Rule rule;

    explicit Order(long seed) : Order(seed, setting("RANK", 0)) {}
    Order(long seed, long rank) : random(seed * 1000 + rank) {
        constexpr Rule rules[] = {Rule::default_stream_first, Rule::priorities, Rule::default_stream_first,
                                  Rule::priorities,           Rule::lazy,       Rule::default_stream_first,
                                  Rule::priorities,           Rule::default_stream_last};
        rule = rules[(seed + rank) % 8];
    }
    double draw() { return std::uniform_real_distribution<double>(0, 1)(random); }
};

double milliseconds() { return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count(); }

class Device {
public:
    static Device& get() {
        static Device* device = new Device;  // never destroyed: its thread may outlive the program's end
        return *device;
    }

    Stream* stream(cudaStream_t handle) {
        if (reinterpret_cast<uintptr_t>(handle) <= 2) return &default_streams_[current_device()];  // cudaStreamLegacy etc.
        return reinterpret_cast<Stream*>(handle);
    }

    Stream* make_stream() {
        std::lock_guard lock(mutex_);
        return add(new Stream);
    }

    Place put(Stream* stream, Task task) {
        std::lock_guard lock(mutex_);
        stream->tasks.push_back(std::move(task));
        last_call_ = Clock::now();
        start_thread();
        to_do_.notify_one();
        return {stream, ++stream->put};
    }

    bool reached(const Place& place) {
        std::lock_guard lock(mutex_);
        return stopped_ || place.reached();
    }

    Place last_of(Stream* stream) {
        std::lock_guard lock(mutex_);
        return {stream, stream->put};
    }

    void wait(const std::vector<Place>& places) {
        ++host_waits_;
        const auto all_reached = [&] {
            return stopped_ || std::all_of(places.begin(), places.end(), [](const Place& place) { return place.reached(); });
        };
        {
            std::lock_guard lock(mutex_);
            // Python may free memory while it computes a result, in the device's own thread.
            if (std::this_thread::get_id() == thread_ || all_reached()) return;
        }
        WithoutPythonLock released;
        std::unique_lock lock(mutex_);
        awaited_.insert(awaited_.end(), places.begin(), places.end());
        to_do_.notify_one();
        done_.wait(lock, all_reached);
        last_call_ = Clock::now();
    }

    void wait_for_all() {
        std::vector<Place> places;
        {
            std::lock_guard lock(mutex_);
            for (Stream* stream : streams_) places.push_back({stream, stream->put});
        }
        wait(places);
    }

    void order_by(long seed) {
        std::lock_guard lock(mutex_);
        order_ = Order(seed);
        for (Stream* stream : streams_) stream->priority = order_.draw();
    }

    // Do no more work: the process ends. Waits for what is being computed.
    void stop() {
        WithoutPythonLock released;
        std::unique_lock lock(mutex_);
        stopped_ = true;
        done_.wait(lock, [&] { return !working_; });
        done_.notify_all();
    }

    long host_waits() const { return host_waits_; }

private:
    Device() {
        for (Stream& stream : default_streams_) add(&stream);
    }

    Stream* add(Stream* stream) {
        stream->priority = order_.draw();
        streams_.push_back(stream);
        return stream;
    }

    void start_thread() {
        if (thread_ != std::thread::id()) return;
        std::thread thread([this] { work(); });
        thread_ = thread.get_id();
        thread.detach();
    }

    bool has_work() const {
        for (const Stream* stream : streams_)
            if (!stream->tasks.empty()) return true;
        return false;
    }

    void work() {
        std::unique_lock lock(mutex_);
        while (true) {
            awaited_.erase(
                std::remove_if(awaited_.begin(), awaited_.end(), [](const Place& place) { return place.reached(); }),
                awaited_.end());
            needed_ = wanted_by_peers();
            needed_.insert(needed_.end(), awaited_.begin(), awaited_.end());
            const bool may_work = !needed_.empty() || Clock::now() - last_call_ > PATIENCE;
            if (stopped_ || !has_work() || !may_work) {
                has_work() ? (void)to_do_.wait_for(lock, TICK) : to_do_.wait(lock);
                continue;
            }
            Stream* stream = choose();
            if (stream == nullptr) {  // all that is ready waits for other processes
                to_do_.wait_for(lock, TICK);
                ++round_;
                continue;
            }
            Task& task = stream->tasks.front();  // a deque's front stays in its place while others are put behind
            working_ = true;
            lock.unlock();
            const bool finished = !task.work || task.work();
            lock.lock();
            working_ = false;
            if (stopped_) done_.notify_all();
            if (!finished) {
                stream->tried = round_;
                continue;
            }
            if (task.finished_at) *task.finished_at = milliseconds();
            stream->tasks.pop_front();
            ++stream->done;
            ++round_;
            if (order_.random() % 32 == 0) streams_[order_.random() % streams_.size()]->priority = order_.draw();
            done_.notify_all();
        }
    }

    // The ready stream that goes on; null: none can.
    Stream* choose() {
        Stream* best = nullptr;
        const auto consider = [&](Stream* stream) {
            if (stream && stream->ready(round_) && (!best || rank_of(stream) > rank_of(best))) best = stream;
        };
        if (order_.rule == Rule::lazy)
            for (const Place& place : needed_) consider(next_for(place));
        if (!best)
            for (Stream* stream : streams_) consider(stream);
        return best;
    }

    double rank_of(const Stream* stream) const {
        const bool is_default = default_streams_ <= stream && stream < default_streams_ + MAX_DEVICES;
        if (!is_default || order_.rule == Rule::priorities || order_.rule == Rule::lazy) return stream->priority;
        return order_.rule == Rule::default_stream_first ? 2 : -1;
    }

    // The stream that must do its next task before `place` can be reached.
    Stream* next_for(Place place) {
        while (true) {
            if (place.reached() || place.stream->tasks.empty()) return nullptr;
            const Place& awaited = place.stream->tasks.front().awaited;
            if (awaited.reached()) return place.stream;
            place = awaited;
        }
    }

    std::mutex mutex_;
    std::condition_variable to_do_, done_;
    std::thread::id thread_;
    Stream default_streams_[MAX_DEVICES];
    std::vector<Stream*> streams_;
    std::vector<Place> awaited_;  // by hosts
    std::vector<Place> needed_;   // by hosts and peers, as the device thread saw it last
    Order order_{setting("FAKE_CUDA_SEED", 0)};
    Clock::time_point last_call_ = Clock::now();
    long round_ = 0;  // of tries; work that waits for another process is tried once a round
    bool working_ = false, stopped_ = false;
    std::atomic<long> host_waits_{0};
};

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

// A function of the Python that this process runs; null where it runs none.
template <typename Function>
Function of_python(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

// Let this thread be known to Python for good: it would else be made known, and forgotten, for each result.
bool attach_to_python() {
    of_python<int (*)()>("PyGILState_Ensure")();
    of_python<void* (*)()>("PyEval_SaveThread")();
    return true;
}

}  // namespace

Place put(cudaStream_t stream, Work work) {
    Device& device = Device::get();
    return device.put(device.stream(stream), {std::move(work), {}, nullptr});
}

WithoutPythonLock::WithoutPythonLock() : state_(nullptr) {
    static const auto is_running = of_python<int (*)()>("Py_IsInitialized");
    static const auto holds_lock = of_python<int (*)()>("PyGILState_Check");
    static const auto release = of_python<void* (*)()>("PyEval_SaveThread");
    if (is_running && is_running() && holds_lock()) state_ = release();
}

WithoutPythonLock::~WithoutPythonLock() {
    static const auto take = of_python<void (*)(void*)>("PyEval_RestoreThread");
    if (state_) take(state_);
}

void wait_for_stream(cudaStream_t stream) {
    Device& device = Device::get();
    device.wait({device.last_of(device.stream(stream))});
}

void wait_for_device() { Device::get().wait_for_all(); }

}  // namespace fake

using namespace fake;

// ---- for Python

EXPORTED void fake_cuda_put(void* stream, void (*work)(long), long argument) {
    put(static_cast<cudaStream_t>(stream), [=] {
        static const bool attached = attach_to_python();
        (void)attached;
        work(argument);
        return true;
    });
}
EXPORTED void fake_cuda_order_by(long seed) { Device::get().order_by(seed); }
EXPORTED void fake_cuda_stop() { Device::get().stop(); }
EXPORTED long fake_cuda_host_waits() { return Device::get().host_waits(); }

// ---- CUDA

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    NEEDS_DEVICE;
    *stream = reinterpret_cast<cudaStream_t>(Device::get().make_stream());
    return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // events may still name it
EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    NEEDS_DEVICE;
    wait_for_stream(stream);
    return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceSynchronize() {
    NEEDS_DEVICE;
    wait_for_device();
    return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamQuery(cudaStream_t handle) {
    NEEDS_DEVICE;
    Device& device = Device::get();
    return device.reached(device.last_of(device.stream(handle))) ? cudaSuccess : cudaErrorNotReady;
}
EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
    const cudaGraphEdgeData**, size_t*) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    NEEDS_DEVICE;
    *event = reinterpret_cast<cudaEvent_t>(new Event);
    return cudaSuccess;
}
EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event_of(event);
    return cudaSuccess;
}
EXPORTED cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    NEEDS_DEVICE;
    Device& device = Device::get();
    Event* event = event_of(handle);
    event->finished_at = std::make_shared<double>(0);
    event->place = device.put(device.stream(stream), {nullptr, {}, event->finished_at});
    return cudaSuccess;
}
EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
    NEEDS_DEVICE;
    return Device::get().reached(event_of(event)->place) ? cudaSuccess : cudaErrorNotReady;
}
EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    NEEDS_DEVICE;
    Device::get().wait({event_of(event)->place});
    return cudaSuccess;
}
EXPORTED cudaError_t cudaEventElapsedTime(float* elapsed, cudaEvent_t begin, cudaEvent_t end) {
    Event *first = event_of(begin), *second = event_of(end);
    if (!first->finished_at || !second->finished_at) return fail(cudaErrorInvalidResourceHandle);
    if (!Device::get().reached(first->place) || !Device::get().reached(second->place)) return fail(cudaErrorNotReady);
    *elapsed = static_cast<float>(*second->finished_at - *first->finished_at);
    return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    NEEDS_DEVICE;
    Device& device = Device::get();
    const Place place = event_of(event)->place;
    if (!device.reached(place)) device.put(device.stream(stream), {nullptr, place, nullptr});
    return cudaSuccess;
}
EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
    NEEDS_DEVICE;
    put(stream, [=] {
        function(argument);
        return true;
    });
    return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument, unsigned) {
    NEEDS_DEVICE;
    put(stream, [=] {
        function(stream, cudaSuccess, argument);
        return true;
    });
    return cudaSuccess;
}
