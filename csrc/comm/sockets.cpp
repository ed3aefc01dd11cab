#include "sockets.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

namespace deadpool {
namespace {

// A private duplicate of a descriptor: what was checked is what is used, whatever happens to the number meanwhile.
class Duplicate {
 public:
  explicit Duplicate(int fd) : fd_(::fcntl(fd, F_DUPFD_CLOEXEC, 0)) {}
  ~Duplicate() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  Duplicate(const Duplicate&) = delete;
  Duplicate& operator=(const Duplicate&) = delete;
  bool valid() const {
    return fd_ >= 0;
  }
  int get() const {
    return fd_;
  }

 private:
  int fd_;
};

std::optional<int> int_option(int fd, int name) {
  int value = 0;
  socklen_t length = sizeof(value);
  if (::getsockopt(fd, SOL_SOCKET, name, &value, &length) != 0) {
    return std::nullopt;
  }
  return value;
}

std::optional<uint64_t> cookie_of(int fd) {
  uint64_t value = 0;
  socklen_t length = sizeof(value);
  if (::getsockopt(fd, SOL_SOCKET, SO_COOKIE, &value, &length) != 0) {
    return std::nullopt;
  }
  return value;
}

// The kernel's state of a TCP connection, or TCP_CLOSE where it has none.
int tcp_state(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 ? info.tcpi_state : TCP_CLOSE;
}

std::string endpoint(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address);
    ::inet_ntop(AF_INET, &v4->sin_addr, text, sizeof(text));
    return std::string(text) + ":" + std::to_string(ntohs(v4->sin_port));
  }
  if (address.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address);
    if (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) {
      ::inet_ntop(AF_INET, &v6->sin6_addr.s6_addr[12], text, sizeof(text));
      return std::string(text) + ":" + std::to_string(ntohs(v6->sin6_port));
    }
    ::inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof(text));
    return "[" + std::string(text) + "]:" + std::to_string(ntohs(v6->sin6_port));
  }
  return "";
}

std::optional<SocketInfo> inspect(int fd) {
  const Duplicate copy(fd);
  if (!copy.valid()) {
    return std::nullopt;
  }
  const auto domain = int_option(copy.get(), SO_DOMAIN);
  if (!domain || (*domain != AF_INET && *domain != AF_INET6) || int_option(copy.get(), SO_TYPE) != SOCK_STREAM) {
    return std::nullopt;
  }
  const auto cookie = cookie_of(copy.get());
  if (!cookie) {
    return std::nullopt;
  }
  SocketInfo info{fd, *cookie, int_option(copy.get(), SO_ACCEPTCONN).value_or(0) != 0, "", ""};
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getsockname(copy.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0) {
    info.local = endpoint(address);
  }
  if (!info.listening) {
    length = sizeof(address);
    if (::getpeername(copy.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
      return std::nullopt; // neither listening nor connected
    }
    info.remote = endpoint(address);
  }
  return info;
}

std::vector<int> open_descriptors() {
  std::vector<int> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir("/proc/self/fd"), ::closedir);
  if (!directory) {
    return found;
  }
  while (const dirent* entry = ::readdir(directory.get())) {
    if (entry->d_name[0] != '.') {
      found.push_back(std::atoi(entry->d_name));
    }
  }
  return found;
}

} // namespace

std::vector<SocketInfo> tcp_sockets() {
  std::vector<SocketInfo> found;
  for (const int fd : open_descriptors()) {
    if (auto info = inspect(fd)) {
      found.push_back(std::move(*info));
    }
  }
  return found;
}

int SocketLedger::record(const std::set<std::string>& locals, const std::set<std::string>& remotes) {
  const int before = recorded();
  for (const auto& socket : tcp_sockets()) {
    if (locals.count(socket.local) != 0 || remotes.count(socket.remote) != 0) {
      add(socket);
    }
  }
  return recorded() - before;
}

void SocketLedger::add(const SocketInfo& socket) {
  if (!socket.listening) {
    const std::lock_guard<std::mutex> lock(mutex_);
    recorded_ += fd_by_cookie_.emplace(socket.cookie, socket.fd).second ? 1 : 0;
  }
}

int SocketLedger::shutdown_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  int count = 0;
  for (const auto& [cookie, fd] : fd_by_cookie_) {
    const Duplicate copy(fd);
    if (copy.valid() && cookie_of(copy.get()) == cookie) {
      // Both directions. A write in this very moment fails, and gloo loses such an operation (waiting.h lets go of it);
      // with the reading side alone it lost more of them when much data was in flight.
      ::shutdown(copy.get(), SHUT_RDWR); // ENOTCONN: the peer was faster, which is as good
      ++count;
    }
  }
  return count;
}

int SocketLedger::still_open(bool disconnected_too) {
  const std::lock_guard<std::mutex> lock(mutex_);
  int count = 0;
  for (auto entry = fd_by_cookie_.begin(); entry != fd_by_cookie_.end();) {
    // Only a question, so the number itself will do: another socket never has this cookie.
    if (cookie_of(entry->second) != entry->first) {
      entry = fd_by_cookie_.erase(entry);
      continue;
    }
    count += disconnected_too || tcp_state(entry->second) != TCP_CLOSE ? 1 : 0;
    ++entry;
  }
  return count;
}

int SocketLedger::recorded() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return recorded_;
}

} // namespace deadpool
