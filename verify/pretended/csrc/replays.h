// Captures and replays, as Python calls them (stubs.py). Part of pretended_cuda.cpp. A number is that of a graph; 0 is none.
#pragma once

extern "C" {
int64_t pretended_new_pool() {
  std::lock_guard<std::recursive_mutex> held(graph_mutex);
  auto id = num_graphs++;
  pools[id] = std::make_shared<Pool>();
  pools[id]->memory = num_memories++;
  write("allocate", here(), std::to_string(pools[id]->memory), "", "0");
  return id;
}
// Threads of the system that are `others` take no part in it.
int64_t pretended_capture_begin(int64_t stream, int64_t pool, const int64_t* others, int64_t num_others) {
  std::lock_guard<std::recursive_mutex> held(graph_mutex);
  auto graph = std::make_shared<Graph>();
  graph->id = num_graphs++;
  graph->origin = stream;
  graph->others = {others, others + num_others};
  graph->pool = pools.at(pool);
  graphs[graph->id] = graph;
  captured_streams[stream] = graph.get();
  graph->clocks[stream];
  num_captures++;
  return graph->id;
}
// What is wrong with the capture; an empty text where nothing is, or where it has been said.
const char* pretended_capture_end(int64_t number) {
  static thread_local std::string wrong;
  std::lock_guard<std::recursive_mutex> held(graph_mutex);
  auto& graph = *graphs.at(number);
  num_captures--;
  wrong.clear();
  for (auto part = captured_streams.begin(); part != captured_streams.end();) {
    if (part->second != &graph) {
      ++part;
      continue;
    }
    if (graph.clocks[graph.origin][part->first] < graph.clocks[part->first][part->first])
      wrong = graph.last[part->first] + " on stream " + std::to_string(part->first) + " is not waited for at the end of the capture";
    part = captured_streams.erase(part);
  }
  graph.ended = num_events++;
  write("record", graph.origin, std::to_string(graph.ended));
  for (auto& [_, held_before] : graph.before) std::memcpy(held_before.first, held_before.second.data(), held_before.second.size());
  spoil(graph);  // nothing that was captured has run
  if (graph.failed) wrong.clear();
  return wrong.c_str();
}
// What the current stream is given from now on comes after what was captured, of which a device has done nothing.
void pretended_capture_is_over(int64_t number) {
  std::lock_guard<std::recursive_mutex> held(graph_mutex);
  write("wait", here(), std::to_string(graphs.at(number)->ended));
}
int64_t pretended_capturing(int64_t stream) {
  if (!num_captures) return 0;
  std::lock_guard<std::recursive_mutex> held(graph_mutex);
  auto found = captured_streams.find(stream);
  return found == captured_streams.end() ? 0 : found->second->id;
}
// A piece of work of Python in a capture, of this memory; it is called by the number that comes back.
int64_t pretended_call(int64_t number, int64_t stream, const char* name, const int64_t* reads, int64_t num_reads, const int64_t* writes, int64_t num_writes) {
  std::lock_guard<std::recursive_mutex> held(graph_mutex);
  auto call = num_calls++;
  notes(graphs.at(number).get(), stream, {reads, reads + num_reads}, {writes, writes + num_writes}, {nullptr, call, name});
  return call;
}
// Begins a replay. What is wrong with it, or an empty text.
const char* pretended_replay(int64_t number) {
  static thread_local std::string wrong;
  std::lock_guard<std::recursive_mutex> held(graph_mutex);
  auto& graph = *graphs.at(number);
  wrong.clear();
  for (const auto* memory : {&graph.reads, &graph.writes})
    for (auto id : *memory)
      if (!live.count(id)) wrong = "a graph is replayed that uses memory " + std::to_string(id) + ", which was allocated outside of its pool and has been let go of since";
  if (!wrong.empty()) return wrong.c_str();
  spoil(graph);
  graph.next = 0;
  std::vector<int64_t> reads(graph.reads.begin(), graph.reads.end()), writes(graph.writes.begin(), graph.writes.end());
  writes.push_back(graph.pool->memory);
  for (auto& [id, block] : graph.pool->blocks)
    if (block.graph == graph.id && !block.freed) writes.push_back(id);
  write("op", here(), "graph replay", joined(reads), joined(writes));
  return wrong.c_str();
}
// Goes on with it up to the next piece of Python's work, whose number comes back: 0 at the end, -1 where it fails.
int64_t pretended_go_on(int64_t number, char* wrong, int64_t room) {
  std::shared_ptr<Graph> graph;
  {
    std::lock_guard<std::recursive_mutex> held(graph_mutex);
    graph = graphs.at(number);
  }
  at::NoGradGuard without;
  while (graph->next < graph->nodes.size()) {
    const auto& node = graph->nodes[graph->next++];
    if (!node.run) return node.call;
    try {
      node.run();
    } catch (const std::exception& error) {
      std::snprintf(wrong, room, "%s: %s", node.name.c_str(), error.what());
      return -1;
    }
  }
  return 0;
}
void pretended_forget_graph(int64_t number) {
  std::lock_guard<std::recursive_mutex> held(graph_mutex);
  graphs.erase(number);
}
}
