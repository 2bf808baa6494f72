// The threads of a model: a step is a program of phases, each cut into chunks that any thread may compute.
//
// A thread first takes the chunks of its own share of a phase, in order, which suits the memory; then it helps others.
// So a thread that the kernel has put aside is waited for only if it holds a chunk, and then for no more than that one.
// Which thread computes a chunk changes no result. Threads spin a few microseconds where a phase is about to end, then
// sleep; between steps they sleep.
//
// Phase numbers only grow, over all steps, and a share's ticket says of which phase its next chunk is:
//
//     ticket = phase << 20 | chunks taken
//
// A helper that wakes late finds newer numbers and takes nothing, which is why the calling thread may return without
// waiting for helpers: a helper works on its own copy of the step, and touches what the step points to only while it
// holds a chunk of it.
#pragma once

#include <atomic>
#include <climits>
#include <thread>
#include <vector>

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static inline void spin_pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

static inline void futex_sleep(std::atomic<uint32_t>* word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
static inline void futex_wake_all(std::atomic<uint32_t>* word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

static const int CHUNK_BITS = 20;
static const uint64_t CHUNK_MASK = (1u << CHUNK_BITS) - 1;
static const int64_t SPIN_NS = 20000;

// STEP is plain data that says what to compute.
template <class STEP>
class Team {
  public:
    using Program = void (*)(Team& team, const STEP& step, uint64_t first_phase, int thread);

    Team(int num_threads, Program program) : num_threads(num_threads), program_(program), shares_((size_t)num_threads) {
        // Signals are the business of the threads that were there before.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (int i = 1; i < num_threads; i++) helpers_.emplace_back([this, i] { help(i); });
        } catch (...) {  // the system has no more threads
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            stop();
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    ~Team() { stop(); }

    // Run the program with the calling thread as thread 0; returns when all phases are done.
    void run(const STEP& step) {
        const uint64_t first_phase = phase_.load();
        if (num_threads > 1) {
            step_number_.fetch_add(1);  // odd: being written
            std::atomic_thread_fence(std::memory_order_seq_cst);
            shared_step_ = step;
            shared_first_phase_ = first_phase;
            std::atomic_thread_fence(std::memory_order_seq_cst);
            announce();
        }
        program_(*this, step, first_phase, 0);
    }

    // Compute chunks 0..num_chunks-1 of the phase, at least one, with the others. Every thread passes every phase in
    // the same order. `body` may read what the step points to; code between phases may not.
    template <class BODY>
    void phase(int thread, uint64_t number, int num_chunks, BODY body) {
        while (phase_.load(std::memory_order_acquire) < number) wait_beyond(number - 1);
        if (phase_.load(std::memory_order_acquire) > number) return;
        int num_done = 0;
        for (int i = 0; i < num_threads; i++) {
            const int share = thread + i < num_threads ? thread + i : thread + i - num_threads;
            const int begin = (int)((int64_t)num_chunks * share / num_threads);
            const int end = (int)((int64_t)num_chunks * (share + 1) / num_threads);
            for (int chunk; (chunk = begin + take(share, number, end - begin)) >= begin; num_done++) body(chunk);
        }
        if (num_done && finished_.fetch_add(num_done, std::memory_order_acq_rel) + num_done == num_chunks) {
            finished_.store(0, std::memory_order_relaxed);
            phase_.store(number + 1);
            changes_.fetch_add(1);
            if (sleepers_.load()) futex_wake_all(&changes_);
        } else {
            wait_beyond(number);
        }
    }

    const int num_threads;

  private:
    struct alignas(64) Share {
        std::atomic<uint64_t> ticket{0};
    };

    // Take the next chunk of a share in a phase; -1 if there is none left or the phase is over. A ticket of an older
    // phase is untouched in this one: a phase ends only when all its chunks were taken.
    int take(int share, uint64_t number, int num_chunks) {
        std::atomic<uint64_t>& ticket = shares_[(size_t)share].ticket;
        uint64_t seen = ticket.load(std::memory_order_relaxed);
        for (;;) {
            if ((seen >> CHUNK_BITS) > number) return -1;
            const int taken = (seen >> CHUNK_BITS) == number ? (int)(seen & CHUNK_MASK) : 0;
            if (taken >= num_chunks) return -1;
            if (ticket.compare_exchange_weak(seen, (number << CHUNK_BITS) | (uint64_t)(taken + 1))) return taken;
        }
    }

    void help(int thread) {
        pthread_setname_np(pthread_self(), "kvrelay-step");
        uint32_t done = 0;
        for (;;) {
            const uint32_t number = step_number_.load(std::memory_order_acquire);
            if (stopping_.load()) return;
            if (number == done || number % 2) {
                wait_for_step(number);
                continue;
            }
            const STEP step = shared_step_;
            const uint64_t first_phase = shared_first_phase_;
            std::atomic_thread_fence(std::memory_order_seq_cst);
            if (step_number_.load() != number) continue;  // overwritten while it was copied
            program_(*this, step, first_phase, thread);
            done = number;
        }
    }

    void stop() {
        stopping_.store(true);
        announce();
        for (auto& helper : helpers_) helper.join();
    }

    void announce() {
        step_number_.fetch_add(1);
        futex_wake_all(&step_number_);
    }

    void wait_for_step(uint32_t seen) {
        if (!spin([&] { return step_number_.load(std::memory_order_acquire) != seen; }))
            futex_sleep(&step_number_, seen);
    }

    // Wait until the open phase is a later one than `number`.
    void wait_beyond(uint64_t number) {
        const auto is_over = [&] { return phase_.load(std::memory_order_acquire) > number; };
        if (spin(is_over)) return;
        while (!is_over()) {
            sleepers_.fetch_add(1);
            const uint32_t changes = changes_.load();
            if (!is_over()) futex_sleep(&changes_, changes);
            sleepers_.fetch_sub(1);
        }
    }

    template <class CONDITION>
    static bool spin(CONDITION is_true) {
        const int64_t give_up = now_ns() + SPIN_NS;
        do {
            for (int i = 0; i < 16; i++) {
                if (is_true()) return true;
                spin_pause();
            }
        } while (now_ns() < give_up);
        return false;
    }

    Program program_;
    std::vector<Share> shares_;
    std::vector<std::thread> helpers_;
    STEP shared_step_{};
    uint64_t shared_first_phase_ = 0;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint64_t> phase_{1};  // the open one
    std::atomic<uint32_t> changes_{0};            // of phase_, for sleepers
    std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<int> finished_{0};          // chunks of the open phase
    alignas(64) std::atomic<uint32_t> step_number_{0};  // odd while shared_step_ is written
};
