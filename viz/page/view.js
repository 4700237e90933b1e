// What is looked at: times, rows, what is folded, found and chosen; kept in the address after #.

const LEAST_SPAN_S = 1e-12;

class View {
  constructor(header) {
    this.header = header;
    this.end = Math.max(...header.timelines.map((entry) => entry.makespan_s), LEAST_SPAN_S);
    this.begin();
  }

  // What is seen first.
  begin() {
    this.lo = 0;
    this.hi = this.end;
    this.scroll = 0;
    this.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const ranks = Math.max(...this.header.timelines.map((entry) => entry.ranks.length));
    this.shows = { messages: ranks <= 8, collectives: true, memory: ranks <= 16, causes: true, groups: ranks > 64, components: false, own: this.apart };
    this.folded = new Set();
    this.query = "";
    this.chosen = null; // [timeline, span]
    this.critical = false;
  }

  // Whether each of two timelines begins with an axis of its own: on the other's one of them would be hardly seen, or
  // who wrote the page wanted it so.
  get apart() {
    const { scale, own_scale_from: factor, timelines } = this.header, lengths = timelines.map((entry) => entry.makespan_s);
    return scale === "own" || (scale === "auto" && Math.max(...lengths) > factor * Math.min(...lengths));
  }

  // Whether several timelines are seen, each with an axis of its own.
  get own() {
    return this.shows.own && this.header.timelines.length > 1;
  }

  // How many times longer a timeline is drawn than its seconds are on the common axis: as long as the longest where each
  // has an axis of its own.
  stretch(entry) {
    return this.own ? this.end / Math.max(entry.makespan_s, LEAST_SPAN_S) : 1;
  }

  // What is seen of a timeline, in its own times.
  seen(entry) {
    const stretch = this.stretch(entry);
    return { lo: this.lo / stretch, hi: this.hi / stretch };
  }

  // Moves the times by a share of what is seen, or scales them around a time.
  pan(share) {
    const by = share * (this.hi - this.lo);
    this.set(this.lo + by, this.hi + by);
  }

  zoom(factor, around = (this.lo + this.hi) / 2) {
    const least = this.end * 1e-9;
    const length = Math.min(Math.max((this.hi - this.lo) * factor, least), this.end);
    const at = (around - this.lo) / (this.hi - this.lo);
    this.set(around - at * length, around + (1 - at) * length);
  }

  set(lo, hi) {
    const length = Math.min(hi - lo, this.end);
    this.lo = Math.min(Math.max(lo, 0), this.end - length);
    this.hi = this.lo + length;
  }

  // Brings a span into sight, with some of what is around it.
  show(entry, span) {
    const stretch = this.stretch(entry), length = this.hi - this.lo;
    const start = entry.start[span] * stretch, end = entry.end[span] * stretch;
    if (start >= this.lo && end <= this.hi && end - start > length / 400) return;
    const wanted = Math.max((end - start) * 24, this.end * 1e-9);
    const shown = end - start > length / 400 && end - start < length ? length : wanted;
    this.set((start + end - shown) / 2, (start + end + shown) / 2);
  }

  get hash() {
    const parts = [];
    const number = (value) => String(Number(value.toPrecision(9)));
    if (this.lo > 0 || this.hi < this.end) parts.push(`t=${number(this.lo)},${number(this.hi)}`);
    if (this.scroll > 0) parts.push(`y=${Math.round(this.scroll)}`);
    parts.push(`show=${Object.keys(this.shows).filter((name) => this.shows[name]).join(",")}`);
    if (this.folded.size) parts.push(`fold=${[...this.folded].sort((a, b) => a - b).join(",")}`);
    if (this.query) parts.push(`q=${encodeURIComponent(this.query)}`);
    if (this.chosen) parts.push(`at=${this.chosen.join(":")}`);
    if (this.critical) parts.push("path=1");
    parts.push(`theme=${this.theme}`);
    return `#${parts.join("&")}`;
  }

  // The view that an address says; what it leaves out is as at first.
  set hash(text) {
    this.begin();
    for (const part of text.replace(/^#/, "").split("&")) {
      const at = part.indexOf("="), name = part.slice(0, at), value = part.slice(at + 1);
      const numbers = () => value.split(/[,:]/).map(Number).filter(Number.isFinite);
      if (name === "t") {
        const [lo, hi] = numbers();
        if (hi > lo) this.set(lo, hi);
      } else if (name === "y") this.scroll = numbers()[0] || 0;
      else if (name === "show") {
        const on = value.split(",");
        for (const key of Object.keys(this.shows)) this.shows[key] = on.includes(key);
      } else if (name === "fold") this.folded = new Set(numbers());
      else if (name === "q") this.query = decoded(value);
      else if (name === "at") {
        const [timeline, span] = numbers();
        if (this.header.timelines[timeline] && span >= 0 && span < this.header.timelines[timeline].num_spans) {
          this.chosen = [timeline, Math.floor(span)];
        }
      } else if (name === "path") this.critical = value === "1";
      else if (name === "theme" && (value === "dark" || value === "light")) this.theme = value;
    }
  }
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

// Which spans a text finds: `rank 3` all of a rank, else those whose token or kind it is (or begins, after a stage).
function found(header, entry, query) {
  const text = query.trim();
  if (!text) return null;
  const hits = new Uint8Array(entry.num_spans);
  const rank = /^rank\s*(\d+)$/i.exec(text);
  const upper = text.toUpperCase();
  const stage = /^STAGE\s*(\d+)$/.exec(upper), batch = /^(?:MICROBATCH|MB)\s*(\d+)$/.exec(upper);
  for (let i = 0; i < entry.num_spans; i++) {
    const kind = header.kinds[entry.kind[i]];
    if (rank) hits[i] = entry.ranks[entry.rank[i]] === Number(rank[1]) ? 1 : 0;
    else if (stage) hits[i] = entry.stage[i] === Number(stage[1]) || entry.pair_stage[i] === Number(stage[1]) ? 1 : 0;
    else if (batch) hits[i] = entry.microbatch[i] === Number(batch[1]) || entry.pair_microbatch[i] === Number(batch[1]) ? 1 : 0;
    else if (kind === upper || token(header, entry, i) === upper) hits[i] = 1;
    else if (kind === "OVERLAP_F_B" && token(header, entry, i).slice(1).split(/[;)]/).slice(0, 2).includes(upper)) hits[i] = 1;
  }
  return hits;
}
