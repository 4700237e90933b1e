// What the file holds, as typed arrays: `viz/page/content.py` packs it.

async function unpack(text) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser cannot unpack gzip. Use one of 2023 or later.");
  }
  const stream = new Blob([bytesOf(text.trim())]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const types = { int8: Int8Array, int32: Int32Array, float64: Float64Array };
  const columns = header.columns.map(
    (column) => new types[column.type](buffer, 4 + length + column.offset, column.length),
  );
  header.timelines.forEach((entry, number) => {
    entry.number = number;
    for (const [name, at] of Object.entries(entry.columns)) entry[name] = columns[at];
    for (const part of entry.memory_parts) part.bytes = columns[part.column];
    completed(entry);
  });
  const { library } = header;
  if (library) for (const [name, at] of Object.entries(library.columns)) library[name] = columns[at];
  return header;
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64); // browsers of 2025
  const binary = atob(base64), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

// Where ranks begin in the columns, and of every rank which others do the same.
function completed(entry) {
  const { rank, lane, stage, pair_stage, num_spans: count } = entry;
  entry.tracks = entry.ranks.map(() => []);
  for (let lo = 0, hi; lo < count; lo = hi) {
    hi = endOfRun(lo, count, (i) => rank[i] === rank[lo] && lane[i] === lane[lo]);
    entry.tracks[rank[lo]].push({ lane: lane[lo], lo, hi });
  }
  entry.gaps = ranges(entry.gap_rank, entry.ranks.length);
  entry.samples = ranges(entry.memory_rank, entry.ranks.length);
  entry.stages = entry.tracks.map((tracks) => {
    const stages = new Set();
    for (const { lane, lo, hi } of tracks) {
      if (entry.lanes[lane].role !== "compute") continue;
      for (let i = lo; i < hi; i++) {
        if (stage[i] >= 0) stages.add(stage[i]);
        if (pair_stage[i] >= 0) stages.add(pair_stage[i]);
      }
    }
    return stages;
  });
  const first = new Map();
  entry.stages = entry.stages.map((stages) => [...stages].sort((a, b) => a - b));
  entry.group = entry.stages.map((stages, rank) => {
    const key = stages.join(",");
    if (!first.has(key)) first.set(key, rank);
    return first.get(key);
  });
}

// The first place behind `lo` that is not the same as it, in an order that keeps the same together: by steps that double,
// then a search between the last two.
function endOfRun(lo, count, isSame) {
  let step = 1;
  while (lo + step < count && isSame(lo + step)) step *= 2;
  let from = lo + (step >> 1), until = Math.min(lo + step, count);
  while (from + 1 < until) {
    const middle = (from + until) >> 1;
    if (isSame(middle)) from = middle;
    else until = middle;
  }
  return until;
}

// Where each value begins and ends in an ascending column.
function ranges(column, count) {
  const found = Array.from({ length: count }, () => ({ lo: 0, hi: 0 }));
  for (let lo = 0, hi; lo < column.length; lo = hi) {
    hi = endOfRun(lo, column.length, (i) => column[i] === column[lo]);
    found[column[lo]] = { lo, hi };
  }
  return found;
}

// The token of a span, as it stands in a schedule: 4F7, (2F3;5B1)OVERLAP_F_B.
function token(header, entry, span) {
  const kind = header.kinds[entry.kind[span]];
  const number = (value) => (value < 0 ? "" : String(value));
  if (kind === "OVERLAP_F_B") {
    const pair = `${entry.pair_stage[span]}B${number(entry.pair_microbatch[span])}`;
    return `(${entry.stage[span]}F${number(entry.microbatch[span])};${pair})OVERLAP_F_B`;
  }
  return `${entry.stage[span]}${kind}${number(entry.microbatch[span])}`;
}

function waitsOf(entry, span) {
  return entry.wait_sources.subarray(entry.wait_offsets[span], entry.wait_offsets[span + 1]);
}

// What waited for a span. Waits are turned round when that is first asked for: the first picture needs none.
function laterOf(entry, span) {
  entry.later ??= turned(entry);
  return entry.later.spans.subarray(entry.later.offsets[span], entry.later.offsets[span + 1]);
}

function turned({ num_spans: count, wait_offsets, wait_sources }) {
  const offsets = new Int32Array(count + 1);
  for (const source of wait_sources) offsets[source + 1]++;
  for (let i = 0; i < count; i++) offsets[i + 1] += offsets[i];
  const next = offsets.slice(), spans = new Int32Array(wait_sources.length);
  for (let span = 0; span < count; span++) {
    for (let k = wait_offsets[span]; k < wait_offsets[span + 1]; k++) spans[next[wait_sources[k]]++] = span;
  }
  return { offsets, spans };
}

// Of what a span waited for, what ended last; -1 for nothing.
function lastWait(entry, span) {
  let found = -1;
  for (const wait of waitsOf(entry, span)) {
    if (wait !== span && (found < 0 || entry.end[wait] > entry.end[found])) found = wait;
  }
  return found;
}

// What led to a span, the span itself, and what it then held up most: spans in order of time.
function chainOf(entry, span) {
  const back = [], seen = new Set([span]);
  for (let at = lastWait(entry, span); at >= 0 && !seen.has(at); at = lastWait(entry, at)) {
    seen.add(at);
    back.push(at);
  }
  const ahead = [];
  for (let at = heldUp(entry, span); at >= 0 && !seen.has(at); at = heldUp(entry, at)) {
    seen.add(at);
    ahead.push(at);
  }
  return [...back.reverse(), span, ...ahead];
}

// Of what waited for a span last of all, what began first; -1 for nothing.
function heldUp(entry, span) {
  let found = -1;
  for (const later of laterOf(entry, span)) {
    if (lastWait(entry, later) === span && (found < 0 || entry.start[later] < entry.start[found])) found = later;
  }
  return found;
}

function criticalPath(entry) {
  let last = -1;
  for (let i = 0; i < entry.num_spans; i++) if (last < 0 || entry.end[i] > entry.end[last]) last = i;
  if (last < 0) return [];
  const chain = [last];
  for (let at = lastWait(entry, last); at >= 0 && chain.length <= entry.num_spans; at = lastWait(entry, at)) chain.push(at);
  return chain.reverse();
}

// What `counterpart` finds of an action that the other timeline's lane has not, and of one whose rank or lane it has not.
const NOWHERE = -1, NO_LANE = -2;

// The same action of the same rank and lane in the other timeline.
function counterpart(header, entry, span) {
  const other = header.timelines[1 - entry.number];
  const lane = other ? laneIn(other, entry.ranks[entry.rank[span]], entry.lanes[entry.lane[span]].name) : null;
  return lane ? (lane.get(keyOf(entry, span)) ?? NOWHERE) : NO_LANE;
}

// The spans of a rank's lane by what they do, null where there is no such rank or lane.
function laneIn(entry, rank, lane) {
  const name = `${rank} ${lane}`;
  entry.byLane ??= new Map();
  if (!entry.byLane.has(name)) {
    const track = entry.tracks[entry.ranks.indexOf(rank)]?.find((each) => entry.lanes[each.lane].name === lane), spans = new Map();
    for (let i = track?.lo ?? 0; i < (track?.hi ?? 0); i++) spans.set(keyOf(entry, i), i);
    entry.byLane.set(name, track ? spans : null);
  }
  return entry.byLane.get(name);
}

// What an action does, as text that is made faster than its token.
function keyOf(entry, i) {
  return `${entry.kind[i]},${entry.stage[i]},${entry.microbatch[i]},${entry.pair_stage[i]},${entry.pair_microbatch[i]}`;
}

// The span before another on its lane, -1 for the lane's first.
function before(entry, span) {
  const same = span > 0 && entry.rank[span - 1] === entry.rank[span] && entry.lane[span - 1] === entry.lane[span];
  return same ? span - 1 : -1;
}

// Where the other timeline has an action behind another one than this: behind which, in words; else nothing.
function otherBefore(header, entry, span) {
  const other = counterpart(header, entry, span);
  if (other < 0) return "";
  const theirs = header.timelines[1 - entry.number], here = before(entry, span), there = before(theirs, other);
  const same = here < 0 || there < 0 ? here === there : keyOf(entry, here) === keyOf(theirs, there);
  return same ? "" : there < 0 ? "the first of its lane" : `behind ${token(header, theirs, there)}`;
}
