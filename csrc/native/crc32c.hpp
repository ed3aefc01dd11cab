// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78): hardware where the processor has it, tables elsewhere.
//
// All functions take and return finished checksums (the usual inversion before and after), so that
// crc32c(b, crc32c(a)) is the checksum of a followed by b. Thread-safe; no function allocates or throws.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deadpool {

// Checksum of `data`, continued from `init` (0 to begin).
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t init);

// The same by tables only: the fallback, and the reference that tests hold the hardware path against.
std::uint32_t crc32c_portable(const void* data, std::size_t nbytes, std::uint32_t init);

// Copies (regions must not overlap) and returns the checksum of what was *written*, in one pass over the cache.
std::uint32_t copy_crc32c(void* destination, const void* source, std::size_t nbytes, std::uint32_t init);

// Checksum of the concatenation, given the checksums of both parts and the length of the second.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes);

// "sse4.2" or "table".
const char* crc32c_backend();

}  // namespace deadpool
