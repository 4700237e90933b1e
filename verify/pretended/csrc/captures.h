// What is given to the streams of a capture is noted, so that a replay does it again on the same memory. Part of pretended_cuda.cpp, inside of its namespace.
#pragma once

constexpr unsigned char POISON = 0xFF;  // no number as a float, -1 as an integer

struct Block {
  void* data;
  size_t num_bytes;
  int64_t graph, stream;
  std::set<int64_t> over;  // graphs whose captures had let go of memory of the stream: the allocator may give it theirs
  bool freed;
};

// The memory that captures allocate. It stays until the last graph and the last tensor in it are gone. What one capture lets go of, the next may be given;
// here each gets memory of its own, and `over` says whose replays may write to it.
struct Pool {
  int64_t memory;                                 // stands for all of it in the log: replays of a pool's graphs must not go on at the same time
  std::map<int64_t, Block> blocks;                // by number of the memory
  std::map<int64_t, std::set<int64_t>> let_go;    // by stream, the graphs whose captures have let go of memory
  ~Pool() {
    for (auto& [id, block] : blocks) std::free(block.data);
  }
};

using Clock = std::map<int64_t, int64_t>;  // by stream, how many pieces of its work are over

struct Node {
  std::function<void()> run;  // none where `call` is for Python
  int64_t call;
  std::string name;
};

struct Graph {
  int64_t id, origin, ended = 0;
  std::shared_ptr<Pool> pool;
  std::vector<Node> nodes;
  std::set<int64_t> reads, writes;                         // memory from outside of the pool
  std::map<int64_t, std::pair<void*, std::string>> before;  // what such memory had before the capture wrote to it
  std::map<int64_t, Clock> clocks;
  std::map<int64_t, std::string> last;  // by stream, what it was given last
  std::set<int64_t> others;  // threads of the system that were there before the capture: they may do something else meanwhile
  size_t next = 0;
  bool failed = false;
};

std::recursive_mutex graph_mutex;
std::map<int64_t, std::shared_ptr<Graph>> graphs;
std::map<int64_t, std::shared_ptr<Pool>> pools;
std::map<int64_t, Graph*> captured_streams;
std::map<int64_t, std::pair<int64_t, Clock>> captured_events;  // by event: the graph, and what was over
std::set<int64_t> live;                                        // memory that is allocated
std::map<int64_t, std::pair<void*, size_t>> places;            // where it lies, and its bytes
std::set<int64_t> shared_memory;                               // that peers write to, whatever this process captures
std::atomic<int64_t> num_graphs{1}, num_calls{1};
std::atomic<int> num_captures{0};

// Whether the thread takes part in none of the captures that go on.
bool is_elsewhere() {
  static thread_local const int64_t own = gettid();
  for (auto& entry : captured_streams)
    if (!entry.second->others.count(own)) return false;
  return true;
}

// The capture that a stream is part of. While one goes on, whatever is given to another stream is an error.
Graph* capture_of(int64_t stream, const std::string& what) {
  if (!num_captures) return nullptr;
  std::lock_guard<std::recursive_mutex> held(graph_mutex);
  auto found = captured_streams.find(stream);
  if (found != captured_streams.end()) return found->second;
  if (is_elsewhere()) return nullptr;
  for (auto& entry : captured_streams) entry.second->failed = true;
  TORCH_CHECK(false, "while a graph is captured, ", what, label.empty() ? "" : " in ", label, " is given to stream ", stream,
              ", which is no part of the capture: it would not be replayed, and what it allocates is not in the graph's pool");
}

void no_wait(const std::string& what) {
  if (!num_captures) return;
  std::lock_guard<std::recursive_mutex> held(graph_mutex);
  if (is_elsewhere() && what != "for the device") return;
  for (auto& entry : captured_streams) entry.second->failed = true;
  TORCH_CHECK(false, "while a graph is captured, the host waits: ", what, label.empty() ? "" : " in ", label);
}

void touches(Graph& graph, const std::vector<int64_t>& ids, bool writes) {
  for (auto id : ids) {
    if (!id || graph.pool->blocks.count(id)) continue;
    (writes ? graph.writes : graph.reads).insert(id);
    if (writes && !graph.before.count(id) && !shared_memory.count(id)) {
      auto [data, num_bytes] = places.at(id);
      graph.before[id] = {data, std::string(static_cast<const char*>(data), num_bytes)};
    }
  }
}

// Before work is done that a capture takes part in: keeps what it overwrites outside of the pool.
void begins(Graph* graph, const std::vector<int64_t>& writes) {
  if (!graph) return;
  std::lock_guard<std::recursive_mutex> held(graph_mutex);
  touches(*graph, writes, true);
}

void notes(Graph* graph, int64_t stream, const std::vector<int64_t>& reads, const std::vector<int64_t>& writes, Node node) {
  std::lock_guard<std::recursive_mutex> held(graph_mutex);
  touches(*graph, reads, false);
  touches(*graph, writes, true);
  graph->clocks[stream][stream]++;
  graph->last[stream] = node.name;
  graph->nodes.push_back(std::move(node));
}

// The memory of the graph, what others may have used since, and what others keep where the graph's own work may lie, is whatever it is.
void spoil(Graph& graph) {
  for (auto& [_, block] : graph.pool->blocks)
    if (block.freed || block.graph == graph.id || block.over.count(graph.id)) std::memset(block.data, POISON, block.num_bytes);
}
