// A vocabulary file for tests (data/vocabulary.h).
#pragma once
#include <xxhash.h>

#include <cstdint>
#include <string>
#include <vector>

namespace llamac {

inline constexpr uint32_t no_token = 0xffffffff;

// Of a tokenizer whose hash is 6 << 32 | 5.
inline std::string vocabulary_file(const std::vector<std::string>& tokens, uint32_t flags = 0,
                                   uint32_t bos = 1, uint32_t eos = no_token) {
    std::string payload, bytes;
    for (const std::string& token : tokens) {
        bytes += token;
        const auto end = static_cast<uint32_t>(bytes.size());
        payload.append(reinterpret_cast<const char*>(&end), 4);
    }
    payload += bytes;
    const uint64_t checksum = XXH3_64bits(payload.data(), payload.size());
    const auto count = static_cast<uint32_t>(tokens.size()), low = static_cast<uint32_t>(checksum),
               high = static_cast<uint32_t>(checksum >> 32);
    const uint32_t header[16] = {20241124, 1, count, bos, eos, no_token, 5, 6, low, high, flags};
    return std::string(reinterpret_cast<const char*>(header), sizeof header) + payload;
}

}  // namespace llamac
