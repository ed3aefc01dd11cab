// A pool of threads that copy memory and checksum it on the way. Knows neither Python nor the arena.
//
// A job is a list of sources that become one contiguous destination. It is split into chunks; threads take them in
// order, and `Progress` tells how much of the destination, counted from its start, is complete and what its checksum is,
// while later chunks are still being copied. The caller keeps sources and destination alive and the sources unchanged
// until the job has ended.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace deadpool {

struct Source {
  const unsigned char* from;
  std::size_t nbytes;
};

struct Progress {
  std::uint64_t nbytes;  // complete from the start on
  std::uint32_t crc;     // CRC-32C of these
};

struct CopyOptions {
  std::size_t chunk_bytes = 4u << 20;
  bool non_temporal = false;                // past the caches: for more than fits into them
  std::uint64_t allowed_bytes = UINT64_MAX;  // chunks that begin at or after this wait for allow()
};

// Everything of a job is guarded by its pool's mutex; pools are shared by their jobs.
class CopyJob {
 public:
  struct Chunk {
    std::size_t at;
    const unsigned char* from;
    std::size_t nbytes;
    std::uint32_t crc = 0;
    bool complete = false;
  };

  std::vector<Chunk> chunks;
  unsigned char* destination = nullptr;
  bool non_temporal = false;
  std::uint64_t allowed_bytes = UINT64_MAX;
  std::size_t taken = 0;    // chunks handed out
  std::size_t running = 0;  // of these, being copied
  std::size_t prefix = 0;   // chunks complete from the start on
  Progress progress{0, 0};
  bool cancelled = false;
  std::chrono::steady_clock::time_point began{};
  double seconds = 0.0;      // from the first chunk's begin to the last one's end
  double cpu_seconds = 0.0;  // of all threads, for this job

  bool complete() const { return prefix == chunks.size(); }
  // Nothing of it runs, and nothing will.
  bool ended() const { return complete() || (cancelled && running == 0); }
};

class CopyPool {
 public:
  // `name`: of the threads (15 bytes). `nice`: added to their niceness. Throws std::system_error.
  CopyPool(unsigned threads, std::string name, int nice);
  ~CopyPool();  // close()
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  // Jobs are carried out one after the other. Throws std::runtime_error once the pool is closed.
  std::shared_ptr<CopyJob> submit(unsigned char* destination, const std::vector<Source>& sources,
                                  const CopyOptions& options);
  // True if the job has ended; waits up to `timeout` for that.
  bool wait(CopyJob& job, std::chrono::duration<double> timeout);
  // Chunks that were not begun are not copied. Returns at once.
  void cancel(CopyJob& job);
  void allow(CopyJob& job, std::uint64_t nbytes);
  Progress progress(const CopyJob& job);
  // No chunk is begun while paused.
  void pause(bool paused);
  // Bytes a second of all jobs together, kept chunk by chunk; 0: as fast as it goes.
  void limit(double bytes_per_second);
  // Ends every job and the threads; waits for chunks that are being copied.
  void close();

 private:
  using Clock = std::chrono::steady_clock;

  void serve();
  bool next(std::unique_lock<std::mutex>& lock, std::shared_ptr<CopyJob>& job, std::size_t& index);
  void finish(CopyJob& job, std::size_t index, std::uint32_t crc, double cpu_seconds);

  const std::string name_;
  const int nice_;
  std::mutex mutex_;
  std::condition_variable work_;   // something to take, or a reason to look again
  std::condition_variable ended_;  // a job has ended
  std::deque<std::shared_ptr<CopyJob>> queue_;  // those with chunks that nobody took
  bool paused_ = false;
  bool closed_ = false;
  double bytes_per_second_ = 0.0;
  Clock::time_point free_at_{};  // when the limit lets the next chunk begin
  std::vector<std::thread> threads_;
};

// Copies (regions must not overlap) with stores that pass the caches by, and returns the checksum of what was read.
// Where there are none such, like copy_crc32c.
std::uint32_t stream_crc32c(void* destination, const void* source, std::size_t nbytes, std::uint32_t init);

}  // namespace deadpool
