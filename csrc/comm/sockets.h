// The connected sockets of one generation's communicators, known by identity and not by number.
//
// Gloo offers no way to end an operation in flight; shutting down its connected sockets does. A descriptor number alone
// is no identity: gloo may have closed it and somebody else got the number. So every socket is remembered by its kernel
// cookie (SO_COOKIE, never reused), and before each shutdown the descriptor is duplicated, the duplicate's cookie is
// compared, and the duplicate is what is shut down.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace deadpool {

// One TCP socket of this process. `local` and `remote` are "address:port", IPv4-mapped addresses as IPv4, `remote`
// empty for listeners.
struct SocketInfo {
  int fd;
  uint64_t cookie;
  bool listening;
  std::string local;
  std::string remote;
};

// All listening or connected TCP sockets of this process, by descriptor. Takes no lock.
std::vector<SocketInfo> tcp_sockets();

// Thread-safe. Holds no descriptor of its own, so it delays nobody's close.
class SocketLedger {
 public:
  // Adds every connected socket whose local address is in `locals` or whose remote address is in `remotes`; returns how
  // many were new. Listeners are never added.
  int record(const std::set<std::string>& locals, const std::set<std::string>& remotes);

  // Adds one connected socket.
  void add(const SocketInfo& socket);

  // Shuts down every recorded socket that is still open, in both directions; returns how many. Listeners cannot be in
  // the ledger; descriptors that now mean something else are left alone.
  int shutdown_all();

  // Recorded sockets that their owner has not closed yet (or only those of them that are still connected); forgets those
  // closed.
  int still_open(bool disconnected_too = true);

  int recorded() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, int> fd_by_cookie_;
  int recorded_{0};
};

} // namespace deadpool
