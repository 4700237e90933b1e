// The engine's longest path over a lowered schedule: each action starts when what it waits for has ended
// (`simulator/engine`, with buffered sends and two receives posted ahead; a test holds both equal).

const RECV_AHEAD = 2;

// One schedule of the library as lists of its ranks: rows of actions { kind, stage, batch, pairStage, pairBatch }.
function rowsOfSchedule(header, number) {
  const { library } = header, entry = library.entries[number], rows = [];
  let at = entry.first;
  for (const length of entry.lengths) {
    const row = [];
    for (const end = at + length; at < end; at++) {
      row.push({
        kind: header.kinds[library.kind[at]],
        stage: library.stage[at],
        batch: library.microbatch[at],
        pairStage: library.pair_stage[at],
        pairBatch: library.pair_microbatch[at],
      });
    }
    rows.push(row);
  }
  return rows;
}

const isSend = (action) => action.kind === "SEND_F" || action.kind === "SEND_B";
const isReceive = (action) => action.kind === "RECV_F" || action.kind === "RECV_B";
const isDp = (action) => action.kind === "REDUCE_GRAD" || action.kind === "UNSHARD" || action.kind === "RESHARD";

// All actions with rank, lane and waits. A wait on a receive is one on its send.
function actionsOf(rows) {
  const all = rows.flatMap((row, rank) => row.map((action) => ({ ...action, rank, waits: [], partner: null, postedAfter: null })));
  const numStages = 1 + all.reduce((most, action) => Math.max(most, action.stage, action.pairStage), 0);
  const at = new Map();
  const key = (kind, stage, batch) => `${kind} ${stage} ${batch}`;
  const find = (kind, stage, batch) => at.get(key(kind, stage, batch));
  for (const action of all) {
    if (action.kind === "OVERLAP_F_B") {
      at.set(key("F", action.stage, action.batch), action);
      at.set(key("B", action.pairStage, action.pairBatch), action);
    } else if (action.kind !== "REDUCE_GRAD" && action.kind !== "STEP") {
      at.set(key(action.kind === "I" ? "B" : action.kind, action.stage, action.batch), action);
    }
  }
  for (const action of all) {
    if (!isSend(action)) continue;
    const step = action.kind === "SEND_F" ? 1 : -1;
    action.partner = find(action.kind === "SEND_F" ? "RECV_F" : "RECV_B", action.stage + step, action.batch);
    action.partner.partner = action;
  }
  const reductions = new Map();
  const lasts = rows.map(() => ({ lanes: new Map(), compute: null, ofStage: new Map(), unshard: new Map(), dp: null }));
  for (const action of all) {
    const last = lasts[action.rank];
    action.lane = laneOf(action);
    const lane = last.lanes.get(action.lane) ?? [];
    if (lane.length && !isReceive(action)) action.waits.push(lane[lane.length - 1]);
    const input = (kind, stage, batch, from) => {
      const received = find(kind, stage, batch), made = find(kind === "RECV_F" ? "F" : "B", from, batch);
      action.waits.push(received ? received.partner : made);
    };
    const forward = action.kind === "F" || action.kind === "OVERLAP_F_B";
    const backward = action.kind === "B" || action.kind === "I" || action.kind === "OVERLAP_F_B";
    const stage = action.kind === "OVERLAP_F_B" ? action.pairStage : action.stage;
    const batch = action.kind === "OVERLAP_F_B" ? action.pairBatch : action.batch;
    if (forward && action.stage > 0) input("RECV_F", action.stage, action.batch, action.stage - 1);
    if (backward && stage < numStages - 1) input("RECV_B", stage, batch, stage + 1);
    if (backward && action.kind !== "OVERLAP_F_B") action.waits.push(find("F", stage, batch));
    if (action.kind === "W") action.waits.push(find("B", stage, batch));
    if (isSend(action)) action.waits.push(find(action.kind === "SEND_F" ? "F" : "B", action.stage, action.batch));
    if (action.kind === "REDUCE_GRAD" || action.kind === "RESHARD") action.waits.push(last.ofStage.get(action.stage));
    if (action.kind === "UNSHARD") action.waits.push(last.compute);
    if (action.kind === "STEP") action.waits.push(last.dp);
    if ((forward || backward || action.kind === "W") && last.unshard.size) {
      action.waits.push(last.unshard.get(action.stage), last.unshard.get(stage));
    }
    if (isReceive(action) && lane.length >= RECV_AHEAD) action.postedAfter = lane[lane.length - RECV_AHEAD].computeBefore;
    action.computeBefore = last.compute;
    lane.push(action);
    last.lanes.set(action.lane, lane);
    if (action.lane === "compute") {
      last.compute = action;
      last.ofStage.set(action.stage, action);
      last.ofStage.set(stage, action);
    }
    if (action.kind === "UNSHARD") last.unshard.set(action.stage, action);
    if (isDp(action)) last.dp = action;
    if (action.kind === "REDUCE_GRAD") reductions.set(action.stage, [...(reductions.get(action.stage) ?? []), action]);
    action.waits = action.waits.filter(Boolean);
  }
  // the reductions of a stage's replicas are one collective
  for (const same of reductions.values()) {
    const waits = same.flatMap((action) => action.waits);
    for (const action of same) action.waits = [...new Set(waits)];
  }
  return all;
}

function laneOf(action) {
  if (isDp(action)) return "dp";
  if (!isSend(action) && !isReceive(action)) return "compute";
  return `${action.kind.endsWith("F") ? "F" : "B"}${isSend(action) ? ">" : "<"}${action.partner.rank}`;
}

// Start and end of every action; durations are { F, I, W, send }.
function settle(all, durations) {
  const backward = durations.I + durations.W;
  const lasts = {
    F: durations.F, B: backward, I: durations.I, W: durations.W, OVERLAP_F_B: durations.F + backward,
    SEND_F: durations.send, SEND_B: durations.send,
  };
  for (const action of all) action.end = undefined;
  let open = all.filter((action) => !isReceive(action));
  for (let upward = true; open.length; upward = !upward) {
    const left = [];
    const stuck = new Set();
    for (const action of upward ? open : orderedDown(open)) {
      const ready = !stuck.has(action.rank) && action.waits.every((wait) => wait.end !== undefined);
      if (!ready) {
        stuck.add(action.rank);
        left.push(action);
        continue;
      }
      action.start = action.waits.reduce((latest, wait) => Math.max(latest, wait.end), 0);
      action.end = action.start + (lasts[action.kind] ?? 0);
    }
    if (left.length === open.length) throw new Error("actions wait for each other in a circle");
    open = upward ? left : orderedDown(left);
  }
  for (const action of all) {
    if (!isReceive(action)) continue;
    const posted = action.postedAfter ? action.postedAfter.end : 0;
    action.start = Math.max(action.partner.start, posted);
    action.end = Math.max(action.partner.end, posted);
  }
  return all;
}

// The last rank first, each rank in its own order.
function orderedDown(actions) {
  const ranks = new Map();
  for (const action of actions) {
    if (!ranks.has(action.rank)) ranks.set(action.rank, []);
    ranks.get(action.rank).push(action);
  }
  return [...ranks.keys()].sort((a, b) => b - a).flatMap((rank) => ranks.get(rank));
}

const LANES = (name) => [
  name === "compute" ? 0 : name === "dp" ? 2 : 1,
  name[0] === "B" ? 1 : 0,
  name[1] === ">" ? 1 : 0,
  Number(name.slice(2)) || 0,
];

// A settled schedule in the form of a timeline that was packed.
function timelineOf(header, all, { name, title, number, findings, share }) {
  const names = [...new Set(all.map((action) => action.lane))].sort((a, b) => {
    const [one, other] = [LANES(a), LANES(b)];
    const at = one.findIndex((value, i) => value !== other[i]);
    return at < 0 ? 0 : one[at] - other[at];
  });
  const place = new Map(names.map((name, at) => [name, at]));
  const spans = [...all].sort((a, b) => a.rank - b.rank || place.get(a.lane) - place.get(b.lane) || a.start - b.start || a.end - b.end);
  spans.forEach((action, at) => (action.at = at));
  const ranks = [...new Set(spans.map((action) => action.rank))];
  const makespan = spans.reduce((most, action) => Math.max(most, action.end), 0);
  const column = (type, value) => type.from(spans, value);
  const waits = spans.map((action) => [...new Set((isReceive(action) ? [action.partner] : action.waits).map((wait) => wait.at))]);
  const offsets = new Int32Array(spans.length + 1);
  waits.forEach((each, at) => (offsets[at + 1] = offsets[at] + each.length));
  const stages = ranks.map((rank) => [...new Set(spans.filter((action) => action.rank === rank && action.lane === "compute")
    .flatMap((action) => [action.stage, action.pairStage]).filter((stage) => stage >= 0))].sort((a, b) => a - b));
  const kinds = new Map(header.kinds.map((kind, at) => [kind, at]));
  const entry = {
    number, source: name, title, makespan_s: makespan, ranks, num_spans: spans.length, capacity_bytes: null, components: [], memory_parts: [],
    lanes: names.map((name) => ({ name, role: name === "compute" ? "compute" : name === "dp" ? "collective" : name[1] === ">" ? "send" : "receive" })),
    rank: column(Int32Array, (action) => action.rank),
    lane: column(Int32Array, (action) => place.get(action.lane)),
    kind: column(Int8Array, (action) => kinds.get(action.kind)),
    stage: column(Int32Array, (action) => action.stage),
    microbatch: column(Int32Array, (action) => action.batch),
    pair_stage: column(Int32Array, (action) => action.pairStage),
    pair_microbatch: column(Int32Array, (action) => action.pairBatch),
    chunk: column(Int32Array, (action) => Math.max(stages[action.rank].indexOf(action.stage), 0)),
    pair_chunk: column(Int32Array, (action) => Math.max(stages[action.rank].indexOf(action.pairStage), 0)),
    start: column(Float64Array, (action) => action.start),
    end: column(Float64Array, (action) => action.end),
    wait_offsets: offsets,
    wait_sources: Int32Array.from(waits.flat()),
  };
  const busy = ranks.map((rank) => spans.reduce((sum, action) => sum + (action.rank === rank && action.lane === "compute" ? action.end - action.start : 0), 0));
  entry.bubbles = busy.map((seconds) => (makespan ? 1 - seconds / makespan : 0));
  Object.assign(entry, gapsOf(header, entry), activationsOf(header, entry, share));
  completed(entry);
  const places = new Map(spans.map((action) => [`${action.rank} ${token(header, entry, action.at)}`, action.at]));
  entry.findings = findings.map((finding) => ({ ...finding, span: places.get(`${finding.rank} ${finding.action}`) ?? -1 }));
  return entry;
}

// Idle times of the compute lanes with their causes, as `core/schedule/waits.py` finds them.
function gapsOf(header, entry) {
  const causes = Object.keys(header.causes), gaps = [];
  const last = entry.end.reduce((at, end, i) => (end > entry.end[at] ? i : at), 0);
  const isMessage = (span) => header.kinds[entry.kind[span]].startsWith("SEND");
  const sent = (span) => (header.kinds[entry.kind[span]].startsWith("RECV") ? waitsOf(entry, span)[0] : span);
  entry.ranks.forEach((_, rank) => {
    let free = 0, first = true;
    const add = (start, end, cause, span) => end > start && gaps.push([rank, start, end, causes.indexOf(cause), span]);
    for (let i = 0; i < entry.num_spans; i++) {
      if (entry.rank[i] !== rank || entry.lanes[entry.lane[i]].role !== "compute") continue;
      const start = entry.start[i];
      if (start > free) {
        const waited = [...waitsOf(entry, i)].map(sent);
        const wait = waited.reduce((at, each) => (at < 0 || entry.end[each] >= entry.end[at] ? each : at), -1);
        const inside = (time) => Math.min(Math.max(time, free), start);
        const kind = wait < 0 ? "" : header.kinds[entry.kind[wait]];
        const began = wait < 0 ? free : inside(entry.start[wait]), ended = wait < 0 ? free : inside(entry.end[wait]);
        const made = wait >= 0 && isMessage(wait) ? ([...waitsOf(entry, wait)].find((each) => !isMessage(each)) ?? wait) : wait;
        if (first) add(free, start, "warm-up", made);
        else {
          if (wait >= 0 && isMessage(wait)) {
            add(free, began, "waiting", made);
            add(began, ended, "message", wait);
          } else add(free, ended, kind === "REDUCE_GRAD" || kind === "UNSHARD" ? "dp-sync" : "waiting", wait);
          add(ended, start, header.kinds[entry.kind[i]] === "STEP" ? "norm" : "replicas", -1);
        }
      }
      free = Math.max(free, entry.end[i]);
      first = false;
    }
    add(free, entry.makespan_s, "end", last);
  });
  const column = (type, at) => type.from(gaps, (gap) => gap[at]);
  return {
    gap_rank: column(Int32Array, 0), gap_start: column(Float64Array, 1), gap_end: column(Float64Array, 2),
    gap_cause: column(Int8Array, 3), gap_span: column(Int32Array, 4),
  };
}

// What forwards keep until their backward, or W, has ended; a forward of one stage counts as `share`.
function activationsOf(header, entry, share) {
  const changes = [];
  const splits = new Set();
  for (let i = 0; i < entry.num_spans; i++) {
    if (header.kinds[entry.kind[i]] === "W") splits.add(`${entry.stage[i]} ${entry.microbatch[i]}`);
  }
  for (let i = 0; i < entry.num_spans; i++) {
    const kind = header.kinds[entry.kind[i]], rank = entry.rank[i];
    const isSplit = splits.has(`${entry.stage[i]} ${entry.microbatch[i]}`);
    if (kind === "F" || kind === "OVERLAP_F_B") changes.push([rank, entry.start[i], 1]);
    if (kind === "OVERLAP_F_B" || kind === "W" || (kind === "B" && !isSplit)) changes.push([rank, entry.end[i], -1]);
  }
  changes.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
  let rank = -1, held = 0;
  const values = changes.map((change) => {
    if (change[0] !== rank) [rank, held] = [change[0], 0];
    held += change[2];
    return held * share;
  });
  return {
    memory_rank: Int32Array.from(changes, (change) => change[0]),
    memory_time: Float64Array.from(changes, (change) => change[1]),
    memory_bytes: Float64Array.from(values),
  };
}
