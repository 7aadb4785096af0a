#include "train/links.h"

#include <algorithm>

namespace llamac {

int64_t Ring::in_host(const Links& links) const {
    return std::clamp<int64_t>(links.per_host / distance, 1, ranks);
}

int64_t Ring::hosts(const Links& links) const {
    const int64_t in = in_host(links);
    return (ranks + in - 1) / in;
}

double Ring::rate(const Links& links) const {
    const auto in = static_cast<double>(in_host(links));
    const double inside = std::min(links.to_all, (in - 1) * links.to_one), between = in * links.network;
    return link_share * (hosts(links) == 1 ? inside : in == 1 ? between : std::min(inside, between));
}

double Ring::seconds(const Links& links, double bytes) const {
    if (ranks == 1 || links.to_one == 0) return 0;
    const auto between = static_cast<double>(hosts(links) - 1),
               inside = static_cast<double>(ranks - 1) - between;
    return links.call + inside * links.step_in_host + between * links.step_between_hosts +
           bytes / rate(links);
}

}  // namespace llamac
