// Rows and tracks: what lies where, and the colours of everything in a track, summed so that any part of it is a
// difference of two sums. That is the level of detail: the cost of drawing depends on pixels, not on spans.

const HEIGHTS = { compute: 24, thin: 10, message: 6, collective: 8, memory: 44, components: 96 }, ROW_GAP = 6;

// How much larger type is than 11 pixels, and with it the room of ranks' names and of the axis of time.
let TYPE = 1, LABEL = 132, AXIS = 30;

// On windows of more than 2,500 pixels type grows with them, as that of `page.css` does.
function setType(width, axes) {
  TYPE = Math.min(Math.max((3 + 0.004 * width) / 13, 1), 18 / 13);
  LABEL = Math.round(132 * TYPE);
  AXIS = Math.round((axes > 1 ? 22 * axes : 30) * TYPE);
}

// How two timelines differ, marked below the actions of their compute lanes: what an action takes longer, as the axes show
// it; and one that the other's lane has not, or behind another action.
const DIFFERENCES = {
  longer: { color: "#d43d2a", name: "takes longer here" },
  elsewhere: { color: "#d48a00", name: "only here, or behind another action" },
};
const MARK = { below: 0.5, height: 2 }; // pixels

function rgb(css) {
  return [1, 3, 5].map((at) => parseInt(css.slice(at, at + 2), 16));
}

// The colours of a kind of action by chunk, none of a pair, which has those of its halves.
function fillsOf(header, theme, name) {
  return (theme === "dark" && header.dark_fills[name]) || header.fills[name] || [];
}

class Colors {
  constructor(header, theme, showsCauses) {
    this.css = [];
    this.red = [];
    this.green = [];
    this.blue = [];
    const dark = theme === "dark";
    this.ground = dark ? "#15191e" : "#ffffff";
    this.idle = this.add(dark ? "#20262d" : "#eef0f2");
    this.kinds = header.kinds.map((name) => fillsOf(header, theme, name).map((fill) => this.add(fill)));
    this.causes = Object.values(header.causes).map((pair) => (showsCauses ? this.add(pair[dark ? 1 : 0]) : this.idle));
    this.pale = this.css.map((_, i) => i);
    const count = this.css.length;
    for (let i = 0; i < count; i++) {
      const mixed = [this.red, this.green, this.blue].map((part) => Math.round(0.22 * part[i] + 0.78 * part[this.idle]));
      this.pale[i] = this.add(`#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`);
    }
  }

  add(css) {
    this.css.push(css);
    rgb(css).forEach((value, at) => [this.red, this.green, this.blue][at].push(value));
    return this.css.length - 1;
  }

  // White where its contrast is 3 at least (WCAG 2.2), else ink.
  textOn(color) {
    const linear = [this.red, this.green, this.blue].map((part) => {
      const value = part[color] / 255;
      return part[color] > 10 ? ((value + 0.055) / 1.055) ** 2.4 : value / 12.92;
    });
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] < 0.3 ? "#ffffff" : "#1f2933";
  }
}

// The spans of a lane, and on the compute lane the idle times between them, in order of time. Both these and their
// colours are made when the track is first seen, by `ready`.
class Track {
  constructor(entry, rank, lane, lo, hi, gaps) {
    Object.assign(this, { entry, rank, lane, lo, hi, gaps, start: null, painted: null });
  }

  // With items and colours, for the `paints` { header, colors, hits } of now.
  ready(paints) {
    if (!this.start) this.collect();
    if (this.painted !== paints) this.paint(paints);
    this.painted = paints;
    return this;
  }

  collect() {
    const { entry, lo, hi, gaps } = this, count = hi - lo + gaps.hi - gaps.lo;
    this.start = new Float64Array(count);
    this.end = new Float64Array(count);
    this.ref = new Int32Array(count); // of a span its number, of an idle time -1 - its number
    for (let i = 0, span = lo, gap = gaps.lo; i < count; i++) {
      const takesSpan = gap >= gaps.hi || (span < hi && entry.start[span] <= entry.gap_start[gap]);
      this.start[i] = takesSpan ? entry.start[span] : entry.gap_start[gap];
      this.end[i] = takesSpan ? entry.end[span] : entry.gap_end[gap];
      this.ref[i] = takesSpan ? span++ : -1 - gap++;
    }
  }

  // How each item differs from the other timeline: `longer` seconds at its end, and whether it is `elsewhere`; null where
  // there is nothing to compare with.
  compare({ header, stretches }) {
    const { entry, ref } = this, other = header.timelines[1 - entry.number];
    if (!other || entry.lanes[this.lane].role !== "compute") return null;
    const ratio = stretches[other.number] / stretches[entry.number];
    if (this.differs?.ratio === ratio) return this.differs;
    const found = { ratio, longer: new Float64Array(ref.length), elsewhere: new Uint8Array(ref.length) };
    for (let i = 0; i < ref.length; i++) {
      const at = ref[i] < 0 ? NO_LANE : counterpart(header, entry, ref[i]);
      if (at === NO_LANE) continue;
      const length = this.end[i] - this.start[i];
      if (at >= 0) found.longer[i] = Math.max(length - (other.end[at] - other.start[at]) * ratio, 0);
      found.elsewhere[i] = at === NOWHERE || otherBefore(header, entry, ref[i]) ? 1 : 0;
    }
    return found;
  }

  // Sums of colour and time up to each item.
  paint(paints) {
    const { header, colors, hits: ofTimelines } = paints;
    this.differs = this.compare(paints);
    const { longer, elsewhere } = this.differs ?? {};
    const { entry, ref } = this, count = ref.length, hits = ofTimelines[entry.number];
    this.color = new Int32Array(count);
    this.second = new Int32Array(count).fill(-1);
    this.sums = [0, 1, 2, 3].map(() => new Float64Array(count + 1));
    const [red, green, blue, time] = this.sums;
    this.marks = this.differs ? [0, 1].map(() => new Float64Array(count + 1)) : [];
    const pair = header.kinds.indexOf("OVERLAP_F_B"), F = header.kinds.indexOf("F"), B = header.kinds.indexOf("B");
    for (let i = 0; i < count; i++) {
      const span = ref[i];
      let color, second = -1;
      if (span < 0) color = colors.causes[entry.gap_cause[-1 - span]];
      else if (entry.kind[span] === pair) {
        color = colors.kinds[F][entry.chunk[span]] ?? colors.kinds[F][0];
        second = colors.kinds[B][entry.pair_chunk[span]] ?? colors.kinds[B][0];
      } else {
        const fills = colors.kinds[entry.kind[span]];
        color = fills[entry.chunk[span]] ?? fills[0];
      }
      if (hits && (span < 0 || !hits[span])) {
        color = colors.pale[color];
        if (second >= 0) second = colors.pale[second];
      }
      this.color[i] = color;
      this.second[i] = second;
      const length = this.end[i] - this.start[i], other = second < 0 ? color : second;
      red[i + 1] = red[i] + (length * (colors.red[color] + colors.red[other])) / 2;
      green[i + 1] = green[i] + (length * (colors.green[color] + colors.green[other])) / 2;
      blue[i + 1] = blue[i] + (length * (colors.blue[color] + colors.blue[other])) / 2;
      time[i + 1] = time[i] + length;
      if (this.differs) {
        this.marks[0][i + 1] = this.marks[0][i] + longer[i];
        this.marks[1][i + 1] = this.marks[1][i] + (elsewhere[i] ? length - longer[i] : 0);
      }
    }
  }

  // The first item that ends after a time.
  after(time, lo = 0) {
    let hi = this.end.length;
    while (lo < hi) {
      const middle = (lo + hi) >> 1;
      if (this.end[middle] > time) hi = middle;
      else lo = middle + 1;
    }
    return lo;
  }
}

// All rows of a view, from top to bottom: { entry, rank, ranks, y, height, tracks: [{ track, y, height }], memory }.
// Heights are multiplied by `stretch`.
function rowsOf(header, view, tracks, stretch) {
  const rows = [], places = new Map(), size = (name) => Math.round(HEIGHTS[name] * TYPE * stretch);
  let y = 0;
  header.timelines.forEach((entry) => {
    entry.ranks.forEach((name, rank) => {
      if (view.shows.groups && entry.group[rank] !== rank) return;
      if (!places.has(name)) places.set(name, []);
      places.get(name).push([entry, rank]);
    });
  });
  const both = header.timelines.length > 1;
  const names = [...places.keys()].sort((a, b) => a - b);
  for (const name of names) {
    for (const [entry, rank] of places.get(name)) {
      const folded = view.folded.has(name);
      const row = { entry, rank, name, y, folded, tracks: [], memory: null };
      const label = [`rank ${name}`];
      if (view.shows.groups) {
        const same = entry.group.filter((first) => first === rank).length;
        if (same > 1) label[0] = `rank ${name} +${same - 1}`;
      }
      if (both) label.push(entry.label);
      row.label = label;
      let at = y;
      for (const track of tracks[entry.number][rank]) {
        const role = entry.lanes[track.lane].role;
        const isMessage = role === "send" || role === "receive";
        if (role !== "compute" && (folded || (isMessage ? !view.shows.messages : !view.shows.collectives))) continue;
        const height = size(role !== "compute" ? (isMessage ? "message" : "collective") : folded ? "thin" : "compute");
        row.tracks.push({ track, y: at, height, role, name: entry.lanes[track.lane].name });
        at += height + (role === "compute" ? 3 : 1);
      }
      const samples = entry.samples[rank];
      if (view.shows.memory && !folded && samples.hi > samples.lo) {
        const parts = view.shows.components ? entry.memory_parts : [];
        row.memory = { y: at + 2, height: size(parts.length ? "components" : "memory"), parts };
        at += row.memory.height + 4;
      }
      row.height = at - y;
      y = at + (both && entry.number === 0 && places.get(name).length > 1 ? 2 : folded ? 2 : ROW_GAP);
      rows.push(row);
    }
  }
  rows.total = y;
  return rows;
}
