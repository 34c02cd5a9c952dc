// NCCL between processes of one machine, through shared memory, under NCCL's rules.
//
// A communicator has one queue a rank: operations start in the order in which they were issued, whatever their streams.
// A transfer moves bytes once both sides have started it, and ends then, too. Ranks compare kind, size and type of what
// they meet for; where these differ, where NCCL would hang or mix up memory, the communicator gets an error.
//
// A communicator's shared memory has a file while its ranks come together. For collectives each rank has a slot, from
// which all others read; for messages there is a mailbox for each sender and receiver. Both hold a chunk at a time.
#include "device.h"

#define __CUDA_FP16_H__  // nccl.h asks for types that it does not use, from headers of packages that are not installed
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__

#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t CHUNK = 64 << 10;                      // bytes
constexpr auto MEETING = std::chrono::seconds(60);      // for all ranks to come
constexpr auto TICK = std::chrono::microseconds(200);

enum class Kind { send, receive, all_reduce, reduce, broadcast, all_gather, reduce_scatter };
const char* const NAMES[] = {"send", "receive", "all-reduce", "reduce", "broadcast", "all-gather", "reduce-scatter"};

// What ranks compare before they move bytes.
struct Terms {
    Kind kind;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t reduction;
    int root;

    bool operator==(const Terms& other) const {
        return kind == other.kind && count == other.count && type == other.type && reduction == other.reduction &&
               root == other.root;
    }
    std::string text() const {
        return std::string(NAMES[static_cast<int>(kind)]) + " of " + std::to_string(count) + " elements of type " +
               std::to_string(type);
    }
};

// ---- shared between processes

struct Slot {  // of one rank
    std::atomic<long> posted, read;  // chunks of collectives: given, and read from all ranks
    std::atomic<long> splits, splits_read;  // begun, and read from all ranks
    std::atomic<int> waits;  // whether the rank has started an operation that has not ended
    int color, key;          // of the split under way
    Terms terms;
    char data[CHUNK];
};

struct Mailbox {  // from one rank to another
    std::atomic<long> written, taken;  // chunks
    std::atomic<long> wanted;          // messages that the receiver has started
    Terms terms;
    char data[CHUNK];
};

struct Shared {
    std::atomic<int> attached;
    std::atomic<int> failed;
};

size_t bytes_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8: return 1;
        case ncclFloat16:
        case ncclBfloat16: return 2;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32: return 4;
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64: return 8;
        default: return 1;  // 8-bit floats
    }
}

// ---- arithmetic of reductions, in the order of ranks: all ranks get the same bits

template <typename T>
void combine(T* sum, const T* other, size_t count, ncclRedOp_t reduction) {
    for (size_t i = 0; i < count; ++i)
        sum[i] = reduction == ncclMax ? std::max(sum[i], other[i])
                 : reduction == ncclMin ? std::min(sum[i], other[i])
                                        : static_cast<T>(sum[i] + other[i]);
}

float wide(uint16_t bfloat) {
    const uint32_t bits = static_cast<uint32_t>(bfloat) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // round to nearest, ties to even
}

bool combine(void* sum, const void* other, size_t count, ncclDataType_t type, ncclRedOp_t reduction) {
    if (reduction != ncclSum && reduction != ncclMax && reduction != ncclMin) return false;
    switch (type) {
        case ncclFloat32: combine(static_cast<float*>(sum), static_cast<const float*>(other), count, reduction); break;
        case ncclFloat64: combine(static_cast<double*>(sum), static_cast<const double*>(other), count, reduction); break;
        case ncclInt32: combine(static_cast<int32_t*>(sum), static_cast<const int32_t*>(other), count, reduction); break;
        case ncclInt64: combine(static_cast<int64_t*>(sum), static_cast<const int64_t*>(other), count, reduction); break;
        case ncclUint8: combine(static_cast<uint8_t*>(sum), static_cast<const uint8_t*>(other), count, reduction); break;
        case ncclBfloat16: {
            auto* to = static_cast<uint16_t*>(sum);
            auto* from = static_cast<const uint16_t*>(other);
            for (size_t i = 0; i < count; ++i) {
                float a = wide(to[i]), b = wide(from[i]);
                combine(&a, &b, 1, reduction);
                to[i] = narrow(a);
            }
            break;
        }
        default: return false;
    }
    return true;
}

// ---- one rank's end of a communicator

struct Operation {
    Terms terms;
    const char* input;
    char* output;
    int peer;          // of messages
    size_t moved = 0;  // bytes; of collectives: of one rank's part
    bool started = false, done = false;
    bool written = false;  // all of a sent message, to the mailbox
    long message = 0;  // number among those to, or from, the peer

    bool is_message() const { return terms.kind == Kind::send || terms.kind == Kind::receive; }
    // Whether both move bytes through one mailbox, or through the slots: then one goes after the other.
    bool shares_memory(const Operation& other) const {
        return is_message() ? terms.kind == other.terms.kind && peer == other.peer : !other.is_message();
    }
};

class Communicator {
public:
    Communicator(const std::string& name, int ranks, int rank) : ranks_(ranks), rank_(rank), name_(name) {
        const size_t bytes = sizeof(Shared) + ranks * sizeof(Slot) + ranks * ranks * sizeof(Mailbox);
        const std::string file = "/dev/shm/mmtrain-fake-nccl-" + name;
        const int descriptor = open(file.c_str(), O_CREAT | O_RDWR, 0600);
        if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) return;
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        close(descriptor);
        if (memory == MAP_FAILED) return;
        shared_ = static_cast<Shared*>(memory);
        slots_ = reinterpret_cast<Slot*>(shared_ + 1);
        mailboxes_ = reinterpret_cast<Mailbox*>(slots_ + ranks);
        sent_.resize(ranks);
        received_.resize(ranks);
        ++shared_->attached;
        met_ = until([&] { return shared_->attached == ranks_; });
        if (rank == 0) unlink(file.c_str());
    }

    bool met() const { return met_; }
    int ranks() const { return ranks_; }
    int rank() const { return rank_; }
    bool failed() const { return shared_->failed; }
    void abort() { aborted_ = true; }

    // Make the communicator of the ranks that give the same color, in the order of their keys. Collective.
    Communicator* split(int color, int key) {
        Slot& mine = slots_[rank_];
        const long number = mine.splits + 1;
        if (!until([&] { return all_of([&](Slot& slot) { return slot.splits_read >= number - 1; }); })) return nullptr;
        mine.color = color;
        mine.key = key;
        mine.splits = number;
        if (!until([&] { return all_of([&](Slot& slot) { return slot.splits >= number; }); })) return nullptr;
        std::vector<std::pair<int, int>> members;
        for (int rank = 0; rank < ranks_; ++rank)
            if (slots_[rank].color == color) members.emplace_back(slots_[rank].key, rank);
        std::sort(members.begin(), members.end());
        mine.splits_read = number;
        if (color == NCCL_SPLIT_NOCOLOR) return nullptr;
        const auto place = std::find(members.begin(), members.end(), std::make_pair(key, rank_));
        const std::string name = name_ + "-" + std::to_string(number) + "." + std::to_string(color);
        return new Communicator(name, static_cast<int>(members.size()), static_cast<int>(place - members.begin()));
    }

    // Queue operations that start together.
    void put(std::vector<Operation> operations, cudaStream_t stream) {
        auto together = std::make_shared<std::vector<Operation>>(std::move(operations));
        long number;
        {
            std::lock_guard lock(mutex_);
            number = issued_++;
        }
        const fake::Place place = fake::put(stream, [this, together, number] { return run(*together, number); });
        std::lock_guard lock(mutex_);
        if (number >= ended_) places_[number] = place;
    }

    // The place of the operation that a peer waits for, if this rank has issued it.
    void add_wanted(std::vector<fake::Place>& places) {
        bool waits = false;
        for (int rank = 0; rank < ranks_; ++rank) waits |= rank != rank_ && slots_[rank].waits;
        if (!waits) return;
        std::lock_guard lock(mutex_);
        if (!places_.empty()) places.push_back(places_.begin()->second);
    }

private:
    template <typename Condition>
    bool until(Condition condition) {
        const auto deadline = std::chrono::steady_clock::now() + MEETING;
        while (!condition()) {
            if (aborted_ || std::chrono::steady_clock::now() > deadline) return false;
            std::this_thread::sleep_for(TICK);
        }
        return true;
    }

    template <typename Condition>
    bool all_of(Condition condition) {
        return std::all_of(slots_, slots_ + ranks_, condition);
    }

    // Whether operation `number` has ended. Called again and again by the device thread alone.
    bool run(std::vector<Operation>& operations, long number) {
        if (aborted_) {
            slots_[rank_].waits = 0;
            return true;
        }
        if (number != ended_ || shared_->failed) return false;
        slots_[rank_].waits = 1;
        bool done = true;
        for (auto operation = operations.begin(); operation != operations.end(); ++operation) {
            const bool is_behind = std::any_of(operations.begin(), operation, [&](const Operation& earlier) {
                return !earlier.done && earlier.shares_memory(*operation);
            });
            if (!operation->done && !is_behind) operation->done = go_on(*operation);
            done &= operation->done;
        }
        if (!done) return false;
        slots_[rank_].waits = 0;
        std::lock_guard lock(mutex_);
        places_.erase(number);
        ++ended_;
        return true;
    }

    bool go_on(Operation& operation) {
        switch (operation.terms.kind) {
            case Kind::send: return send(operation);
            case Kind::receive: return receive(operation);
            default: return take_part(operation);
        }
    }

    Mailbox& mailbox(int from, int to) { return mailboxes_[from * ranks_ + to]; }

    bool send(Operation& operation) {
        Mailbox& box = mailbox(rank_, operation.peer);
        if (!operation.started) {
            operation.started = true;
            operation.message = ++sent_[operation.peer];
        }
        const size_t bytes = operation.terms.count * bytes_of(operation.terms.type);
        while (box.wanted >= operation.message && box.written == box.taken) {
            if (operation.written) return true;
            const size_t chunk = std::min(CHUNK, bytes - operation.moved);
            std::memcpy(box.data, operation.input + operation.moved, chunk);
            box.terms = operation.terms;
            operation.moved += chunk;
            operation.written = operation.moved == bytes;
            ++box.written;
        }
        return false;
    }

    bool receive(Operation& operation) {
        Mailbox& box = mailbox(operation.peer, rank_);
        if (!operation.started) {
            operation.started = true;
            operation.message = ++received_[operation.peer];
            box.wanted = operation.message;
        }
        const size_t bytes = operation.terms.count * bytes_of(operation.terms.type);
        if (box.written == box.taken) return false;
        if (box.terms.count != operation.terms.count || box.terms.type != operation.terms.type)
            return differ(operation.peer, box.terms, operation.terms);
        const size_t chunk = std::min(CHUNK, bytes - operation.moved);
        std::memcpy(operation.output + operation.moved, box.data, chunk);
        operation.moved += chunk;
        ++box.taken;
        return operation.moved == bytes;
    }

    bool take_part(Operation& operation) {
        const Terms& terms = operation.terms;
        const size_t element = bytes_of(terms.type), bytes = terms.count * element;
        const size_t parts = terms.kind == Kind::reduce_scatter ? ranks_ : 1;  // of a slot
        const size_t most = CHUNK / parts / element * element;
        Slot& mine = slots_[rank_];
        while (true) {
            const size_t chunk = std::min(most, bytes - operation.moved);
            const long number = mine.read + 1;
            if (mine.posted < number) {
                if (!all_of([&](Slot& slot) { return slot.read >= number - 1; })) return false;
                mine.terms = terms;
                if (terms.kind != Kind::broadcast || terms.root == rank_)
                    for (size_t part = 0; part < parts; ++part)
                        std::memcpy(mine.data + part * chunk, operation.input + part * bytes + operation.moved, chunk);
                mine.posted = number;
            }
            if (!all_of([&](Slot& slot) { return slot.posted >= number; })) return false;
            for (int rank = 0; rank < ranks_; ++rank)
                if (!(slots_[rank].terms == terms)) return differ(rank, slots_[rank].terms, terms);
            if (!give_out(operation, chunk)) return false;
            operation.moved += chunk;
            mine.read = number;
            if (operation.moved == bytes) return true;
        }
    }

    // Write what all ranks have posted of one chunk to this rank's output.
    bool give_out(Operation& operation, size_t chunk) {
        const Terms& terms = operation.terms;
        const size_t element = bytes_of(terms.type), bytes = terms.count * element;
        char* output = operation.output + operation.moved;
        switch (terms.kind) {
            case Kind::broadcast: std::memcpy(output, slots_[terms.root].data, chunk); return true;
            case Kind::all_gather:
                for (int rank = 0; rank < ranks_; ++rank) std::memcpy(output + rank * bytes, slots_[rank].data, chunk);
                return true;
            default: break;
        }
        if (terms.kind == Kind::reduce && terms.root != rank_) return true;
        const size_t offset = terms.kind == Kind::reduce_scatter ? rank_ * chunk : 0;
        std::memcpy(output, slots_[0].data + offset, chunk);
        for (int rank = 1; rank < ranks_; ++rank)
            if (!combine(output, slots_[rank].data + offset, chunk / element, terms.type, terms.reduction))
                return report("cannot compute a reduction of type " + std::to_string(terms.type));
        return true;
    }

    bool differ(int other, const Terms& theirs, const Terms& ours) {
        return report("rank " + std::to_string(rank_) + " is at " + ours.text() + " where rank " + std::to_string(other) +
                      " is at " + theirs.text());
    }

    bool report(const std::string& text) {
        if (!shared_->failed.exchange(1))
            std::fprintf(stderr, "fake NCCL: communicator of %d: %s\n", ranks_, text.c_str());
        return false;
    }

    const int ranks_, rank_;
    const std::string name_;
    Shared* shared_ = nullptr;
    Slot* slots_ = nullptr;
    Mailbox* mailboxes_ = nullptr;
    bool met_ = false;
    std::atomic<bool> aborted_{false};
    std::mutex mutex_;  // of what follows, which host threads change, too
    long issued_ = 0;
    std::atomic<long> ended_{0};
    std::map<long, fake::Place> places_;  // of operations that have not ended
    std::vector<long> sent_, received_;   // messages started, by peer
};

std::mutex all_mutex;
std::vector<Communicator*>& all() {
    static auto* communicators = new std::vector<Communicator*>;  // never freed: work may still name them
    return *communicators;
}

ncclResult_t give(ncclComm_t* result, Communicator* made) {
    if (!made->met()) {
        std::fprintf(stderr, "fake NCCL: rank %d of %d: the others did not come, or /dev/shm is full\n", made->rank(),
                     made->ranks());
        return ncclSystemError;
    }
    std::lock_guard lock(all_mutex);
    all().push_back(made);
    *result = reinterpret_cast<ncclComm_t>(made);
    return ncclSuccess;
}

Communicator* of(ncclComm_t handle) { return reinterpret_cast<Communicator*>(handle); }

// Operations between ncclGroupStart and ncclGroupEnd, by communicator and stream, in order of issue.
struct Issued {
    Communicator* communicator;
    cudaStream_t stream;
    std::vector<Operation> operations;
};
thread_local int group_depth = 0;
thread_local std::vector<Issued> grouped;

ncclResult_t issue_group() {
    std::vector<Issued> all_issued;
    all_issued.swap(grouped);
    for (Issued& issued : all_issued) issued.communicator->put(std::move(issued.operations), issued.stream);
    return ncclSuccess;
}

ncclResult_t issue(ncclComm_t handle, cudaStream_t stream, Operation operation) {
    Communicator* communicator = of(handle);
    auto found = std::find_if(grouped.begin(), grouped.end(), [&](const Issued& issued) {
        return issued.communicator == communicator && issued.stream == stream;
    });
    if (found == grouped.end()) found = grouped.insert(grouped.end(), {communicator, stream, {}});
    found->operations.push_back(std::move(operation));
    return group_depth ? ncclSuccess : issue_group();
}

Operation operation(
    Kind kind, const void* input, void* output, size_t count, ncclDataType_t type, ncclRedOp_t reduction, int peer) {
    const bool is_message = kind == Kind::send || kind == Kind::receive;
    return {{kind, count, type, reduction, is_message ? 0 : peer}, static_cast<const char*>(input),
            static_cast<char*>(output), peer};
}

std::string name_of(const ncclUniqueId& id) { return std::string(id.internal, strnlen(id.internal, 32)); }

}  // namespace

std::vector<fake::Place> fake::wanted_by_peers() {
    std::vector<Place> places;
    std::lock_guard lock(all_mutex);
    for (Communicator* communicator : all()) communicator->add_wanted(places);
    return places;
}

EXPORTED ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
EXPORTED ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    std::memset(id, 0, sizeof *id);
    std::random_device random;
    std::snprintf(id->internal, sizeof id->internal, "%08x%08x", random(), random());
    return ncclSuccess;
}
EXPORTED ncclResult_t ncclCommInitRankConfig(ncclComm_t* result, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
    fake::WithoutPythonLock released;
    return give(result, new Communicator(name_of(id), ranks, rank));
}
EXPORTED ncclResult_t ncclCommInitRank(ncclComm_t* result, int ranks, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(result, ranks, id, rank, nullptr);
}
EXPORTED ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* result, int ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t* config) {
    return ncclCommInitRankConfig(result, ranks, ids[0], rank, config);
}
EXPORTED ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* result, ncclConfig_t*) {
    fake::WithoutPythonLock released;
    Communicator* made = of(parent)->split(color, key);
    *result = nullptr;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    return made ? give(result, made) : ncclSystemError;
}
EXPORTED ncclResult_t ncclCommAbort(ncclComm_t handle) {
    of(handle)->abort();
    return ncclSuccess;
}
EXPORTED ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
    *error = of(handle)->failed() ? ncclInternalError : ncclSuccess;
    return ncclSuccess;
}
EXPORTED ncclResult_t ncclCommCount(const ncclComm_t handle, int* ranks) {
    *ranks = of(handle)->ranks();
    return ncclSuccess;
}
EXPORTED ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
    *rank = of(handle)->rank();
    return ncclSuccess;
}
EXPORTED const char* ncclGetErrorString(ncclResult_t) { return "fake NCCL error"; }
EXPORTED const char* ncclGetLastError(ncclComm_t) { return "see the lines that begin with fake NCCL"; }
EXPORTED ncclResult_t ncclGroupStart() {
    ++group_depth;
    return ncclSuccess;
}
EXPORTED ncclResult_t ncclGroupEnd() { return --group_depth ? ncclSuccess : issue_group(); }
EXPORTED ncclResult_t ncclSend(
    const void* input, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return issue(comm, stream, operation(Kind::send, input, nullptr, count, type, ncclSum, peer));
}
EXPORTED ncclResult_t ncclRecv(
    void* output, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return issue(comm, stream, operation(Kind::receive, nullptr, output, count, type, ncclSum, peer));
}
EXPORTED ncclResult_t ncclAllReduce(
    const void* input, void* output, size_t count, ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm,
    cudaStream_t stream) {
    return issue(comm, stream, operation(Kind::all_reduce, input, output, count, type, reduction, 0));
}
EXPORTED ncclResult_t ncclReduce(
    const void* input, void* output, size_t count, ncclDataType_t type, ncclRedOp_t reduction, int root, ncclComm_t comm,
    cudaStream_t stream) {
    return issue(comm, stream, operation(Kind::reduce, input, output, count, type, reduction, root));
}
EXPORTED ncclResult_t ncclBroadcast(
    const void* input, void* output, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return issue(comm, stream, operation(Kind::broadcast, input, output, count, type, ncclSum, root));
}
EXPORTED ncclResult_t ncclBcast(
    void* memory, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(memory, memory, count, type, root, comm, stream);
}
EXPORTED ncclResult_t ncclAllGather(
    const void* input, void* output, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return issue(comm, stream, operation(Kind::all_gather, input, output, count, type, ncclSum, 0));
}
EXPORTED ncclResult_t ncclReduceScatter(
    const void* input, void* output, size_t count, ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm,
    cudaStream_t stream) {
    return issue(comm, stream, operation(Kind::reduce_scatter, input, output, count, type, reduction, 0));
}
