// The time of exchanges between planned devices, from the published rates of their links (configs/tables/devices.toml).
#pragma once
#include <cstdint>

namespace llamac {

// Between the devices of a host, and from host to host. Bytes per second in one direction; 0: not in the table.
struct Links {
    double to_one = 0;     // from a device to another one of its host
    double to_all = 0;     // from a device to all others of its host together
    double network = 0;    // from a device to other hosts
    int64_t per_host = 8;  // devices
    // Seconds per collective, and per step of its ring in a host, and between hosts.
    double call = 0, step_in_host = 0, step_between_hosts = 0;
};

// The share of a link's published rate that exchanges reach.
constexpr double link_share = 0.7;

// Ranks that are `distance` apart, the first one of which is the first of a host.
struct Ring {
    int64_t ranks = 1, distance = 1;

    int64_t in_host(const Links& links) const;  // ranks per host
    int64_t hosts(const Links& links) const;
    // Bytes per second that each rank sends, while the rings of the ranks between do the same. As many rings as there are devices in
    // a host leave it through one device each.
    double rate(const Links& links) const;
    // Of a reduce_scatter or an all_gather (an all_reduce is both) in which each rank sends so many bytes.
    double seconds(const Links& links, double bytes) const;
};

}  // namespace llamac
