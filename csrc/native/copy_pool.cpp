#include "copy_pool.hpp"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "crc32c.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace deadpool {
namespace {

double thread_cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

std::uint32_t stream_crc32c(void* destination, const void* source, std::size_t nbytes, std::uint32_t init) {
#if defined(__x86_64__)
  constexpr std::size_t kBlock = 48 * 1024;  // summed first, which brings it into the cache, then written from there
  constexpr std::size_t kLine = 64;
  auto* to = static_cast<unsigned char*>(destination);
  const auto* from = static_cast<const unsigned char*>(source);
  const std::size_t head = std::min(nbytes, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  std::uint32_t crc = copy_crc32c(to, from, head, init);
  to += head;
  from += head;
  nbytes -= head;
  while (nbytes >= kLine) {
    const std::size_t block = std::min(nbytes, kBlock) / kLine * kLine;
    crc = crc32c(from, block, crc);
    for (std::size_t at = 0; at < block; at += kLine) {
      const auto* line = reinterpret_cast<const __m128i*>(from + at);
      auto* out = reinterpret_cast<__m128i*>(to + at);
      const __m128i a = _mm_loadu_si128(line);
      const __m128i b = _mm_loadu_si128(line + 1);
      const __m128i c = _mm_loadu_si128(line + 2);
      const __m128i d = _mm_loadu_si128(line + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
    to += block;
    from += block;
    nbytes -= block;
  }
  _mm_sfence();  // such stores are ordered by nothing else: before anybody is told that the bytes are there
  return copy_crc32c(to, from, nbytes, crc);
#else
  return copy_crc32c(destination, source, nbytes, init);
#endif
}

CopyPool::CopyPool(unsigned threads, std::string name, int nice) : name_(std::move(name)), nice_(nice) {
  try {
    for (unsigned number = 0; number < threads; ++number) threads_.emplace_back([this] { serve(); });
  } catch (...) {
    close();
    throw;
  }
}

CopyPool::~CopyPool() { close(); }

std::shared_ptr<CopyJob> CopyPool::submit(unsigned char* destination, const std::vector<Source>& sources,
                                          const CopyOptions& options) {
  auto job = std::make_shared<CopyJob>();
  job->destination = destination;
  job->non_temporal = options.non_temporal;
  job->allowed_bytes = options.allowed_bytes;
  std::size_t at = 0;
  for (const Source& source : sources) {
    for (std::size_t begin = 0; begin < source.nbytes; begin += options.chunk_bytes) {
      const std::size_t nbytes = std::min(options.chunk_bytes, source.nbytes - begin);
      job->chunks.push_back({at, source.from + begin, nbytes});
      at += nbytes;
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw std::runtime_error("the copy pool is closed");
    if (!job->chunks.empty()) queue_.push_back(job);
  }
  work_.notify_all();
  return job;
}

bool CopyPool::wait(CopyJob& job, std::chrono::duration<double> timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return ended_.wait_for(lock, timeout, [&job] { return job.ended(); });
}

void CopyPool::cancel(CopyJob& job) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    job.cancelled = true;
    queue_.erase(std::remove_if(queue_.begin(), queue_.end(), [&job](const auto& other) { return other.get() == &job; }),
                 queue_.end());
  }
  work_.notify_all();
  ended_.notify_all();
}

void CopyPool::allow(CopyJob& job, std::uint64_t nbytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    job.allowed_bytes = nbytes;
  }
  work_.notify_all();
}

Progress CopyPool::progress(const CopyJob& job) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return job.progress;
}

void CopyPool::pause(bool paused) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    paused_ = paused;
  }
  work_.notify_all();
}

void CopyPool::limit(double bytes_per_second) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    bytes_per_second_ = bytes_per_second;
    free_at_ = Clock::now();
  }
  work_.notify_all();
}

void CopyPool::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    for (const auto& job : queue_) job->cancelled = true;
    queue_.clear();
  }
  work_.notify_all();
  ended_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

// Waits for the next chunk that may be copied now. False: the pool is closed.
bool CopyPool::next(std::unique_lock<std::mutex>& lock, std::shared_ptr<CopyJob>& job, std::size_t& index) {
  while (!closed_) {
    if (!paused_ && !queue_.empty()) {
      CopyJob& front = *queue_.front();
      const CopyJob::Chunk& chunk = front.chunks[front.taken];
      const Clock::time_point now = Clock::now();
      if (chunk.at < front.allowed_bytes) {
        if (bytes_per_second_ > 0.0 && now < free_at_) {
          work_.wait_until(lock, free_at_);
          continue;
        }
        if (bytes_per_second_ > 0.0) {
          const std::chrono::duration<double> cost(static_cast<double>(chunk.nbytes) / bytes_per_second_);
          free_at_ = now + std::chrono::duration_cast<Clock::duration>(cost);
        }
        job = queue_.front();
        index = job->taken++;
        if (index == 0) job->began = now;
        ++job->running;
        if (job->taken == job->chunks.size()) queue_.pop_front();
        return true;
      }
    }
    work_.wait(lock);
  }
  return false;
}

void CopyPool::serve() {
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  // Niceness is a thread's own on Linux. Refused only where it would be raised; then it stays as it is.
  const auto id = static_cast<id_t>(syscall(SYS_gettid));
  if (nice_ != 0) setpriority(PRIO_PROCESS, id, getpriority(PRIO_PROCESS, id) + nice_);
  std::unique_lock<std::mutex> lock(mutex_);
  std::shared_ptr<CopyJob> job;
  std::size_t index = 0;
  while (next(lock, job, index)) {
    const CopyJob::Chunk chunk = job->chunks[index];
    unsigned char* to = job->destination + chunk.at;
    lock.unlock();
    const double before = thread_cpu_seconds();
    const std::uint32_t crc = job->non_temporal ? stream_crc32c(to, chunk.from, chunk.nbytes, 0)
                                                : copy_crc32c(to, chunk.from, chunk.nbytes, 0);
    const double cpu = thread_cpu_seconds() - before;
    lock.lock();
    finish(*job, index, crc, cpu);
    job.reset();
  }
}

void CopyPool::finish(CopyJob& job, std::size_t index, std::uint32_t crc, double cpu_seconds) {
  job.chunks[index].crc = crc;
  job.chunks[index].complete = true;
  job.cpu_seconds += cpu_seconds;
  --job.running;
  for (; job.prefix < job.chunks.size() && job.chunks[job.prefix].complete; ++job.prefix) {
    const CopyJob::Chunk& chunk = job.chunks[job.prefix];
    job.progress.crc = crc32c_combine(job.progress.crc, chunk.crc, chunk.nbytes);
    job.progress.nbytes += chunk.nbytes;
  }
  if (job.ended()) {
    job.seconds = std::chrono::duration<double>(Clock::now() - job.began).count();
    ended_.notify_all();
  }
}

}  // namespace deadpool
