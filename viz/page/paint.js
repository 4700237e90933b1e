// Draws what is seen onto a canvas. Lengths are in CSS pixels.

const FONTS = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";

class Painter {
  constructor(canvas, header) {
    this.canvas = canvas;
    this.header = header;
    this.context = canvas.getContext("2d", { alpha: false });
    this.strip = document.createElement("canvas");
    this.strip.height = 1;
    this.widths = new Map();
  }

  // The canvas' size and dots per pixel: those of the window, or of `paper` where one prints.
  get room() {
    const { clientWidth: width, clientHeight: height } = this.canvas.parentElement;
    return this.paper ?? { width, height, scale: window.devicePixelRatio || 1 };
  }

  fit() {
    const { canvas } = this, { width, height, scale } = this.room;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    Object.assign(this, { width, height, scale, plot: Math.max(width - LABEL - 8, 10) });
  }

  // Times are of the common axis, or of a timeline where `seen` is what one sees of it.
  x(time, seen = this.view) {
    return LABEL + ((time - seen.lo) / (seen.hi - seen.lo)) * this.plot;
  }

  // How far below the upper edge rows begin.
  get top() {
    return AXIS;
  }

  timeAt(x, seen = this.view) {
    return seen.lo + ((x - LABEL) / this.plot) * (seen.hi - seen.lo);
  }

  draw(view, rows, paints) {
    Object.assign(this, { view, paints, colors: paints.colors });
    const { colors } = paints;
    const { context } = this, dark = view.theme === "dark";
    this.ink = dark ? "#e6eaee" : "#1f2933";
    this.muted = dark ? "#9aa6b2" : "#66727f";
    this.rule = dark ? "#3a444e" : "#c5ccd3";
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.fillStyle = colors.ground;
    context.fillRect(0, 0, this.width, this.height);
    context.font = `${11 * TYPE}px ${FONTS}`;
    if (this.type !== TYPE) this.widths.clear();
    this.type = TYPE;
    context.textBaseline = "middle";
    this.boxes = 0;
    context.save();
    context.beginPath();
    context.rect(0, AXIS, this.width, this.height - AXIS);
    context.clip();
    const top = AXIS - view.scroll;
    for (const row of rows) {
      if (top + row.y > this.height || top + row.y + row.height < AXIS) continue;
      this.row(row, top);
    }
    this.findings(rows, top);
    context.beginPath();
    context.rect(LABEL, AXIS, this.plot, this.height - AXIS);
    context.clip(); // outlines and arrows of what lies further left cross no name of a rank, and none the edge
    if (view.critical) for (const entry of this.header.timelines) this.chain(criticalOf(entry), rows, top, entry, dark ? "#ff9d5c" : "#b3400a");
    if (view.chosen) {
      const entry = this.header.timelines[view.chosen[0]];
      this.chain(this.chainOf(entry, view.chosen[1]), rows, top, entry, this.ink);
      this.outline(entry, view.chosen[1], rows, top);
    }
    context.restore();
    this.axis();
  }

  chainOf(entry, span) {
    if (!this.known || this.known.entry !== entry || this.known.span !== span) {
      this.known = { entry, span, chain: chainOf(entry, span) };
    }
    return this.known.chain;
  }

  // The axis of time, or one of each timeline below the other.
  axis() {
    const { context, view, header } = this, line = AXIS / (view.own ? header.timelines.length : 1);
    context.fillStyle = this.colors.ground;
    context.fillRect(0, 0, this.width, AXIS);
    context.strokeStyle = this.rule;
    context.beginPath();
    if (view.own) {
      header.timelines.forEach((entry, at) => this.ticks(view.seen(entry), entry.makespan_s, `${entry.label}, `, line * at, line));
    } else this.ticks(view, view.end, "", 0, line);
    context.moveTo(0, AXIS - 0.5);
    context.lineTo(this.width, AXIS - 0.5);
    context.stroke();
  }

  ticks(seen, end, name, top, height) {
    const { context } = this, length = seen.hi - seen.lo, unit = unitOf(this.header, length, end);
    context.fillStyle = this.muted;
    context.textAlign = "center";
    const step = niceStep(length / Math.max(this.plot / (110 * TYPE), 1) / unit.scale);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), middle = top + height / 2;
    for (let k = Math.ceil(seen.lo / unit.scale / step - 1e-9); k * step * unit.scale <= seen.hi * (1 + 1e-12); k++) {
      const x = Math.round(this.x(k * step * unit.scale, seen)) + 0.5;
      context.moveTo(x, top + height - 6);
      context.lineTo(x, top + height);
      const text = (k * step).toFixed(digits);
      if (x + this.widthOf(text) / 2 < this.width) context.fillText(text, x, middle);
    }
    context.textAlign = "left";
    context.fillText(`${name}${unit.name}`, 10, middle);
  }

  row(row, top) {
    const { context } = this;
    context.textAlign = "left";
    context.fillStyle = this.ink;
    const first = row.tracks[0];
    const middle = top + row.y + (first ? first.height : row.height) / 2;
    const name = `${row.folded ? "▸" : "▾"} ${row.label[0]}`;
    if (!row.folded || row.height >= 10 * TYPE) context.fillText(name, 8, middle);
    if (row.label[1]) {
      context.fillStyle = this.muted;
      if (!row.folded && row.height > 26 * TYPE) context.fillText(row.label[1], 20 * TYPE, middle + 14 * TYPE);
      else if (row.height >= 10 * TYPE) {
        const left = 8 + this.widthOf(name) + 6 * TYPE;
        context.fillText(row.label[1], left, middle, LABEL - left - 4); // narrower letters where it is a long name
      }
    }
    for (const place of row.tracks) this.track(place, top);
    if (row.memory) this.memory(row, top);
  }

  track(place, top) {
    const { context, view, colors } = this, { track, height } = place, y = top + place.y, seen = view.seen(track.entry);
    const lo = track.ready(this.paints).after(seen.lo);
    let hi = track.after(seen.hi, lo);
    if (hi < track.start.length && track.start[hi] < seen.hi) hi++;
    if (place.role === "compute") {
      context.fillStyle = colors.css[colors.idle];
      context.fillRect(LABEL, y, this.plot, height);
    }
    if (hi - lo > this.plot / 3) {
      this.dense(track, seen, y, height);
      return;
    }
    let last = -1;
    const pixels = this.plot / (seen.hi - seen.lo);
    for (let i = lo; i < hi; i++) {
      const from = Math.max(track.start[i], seen.lo), until = Math.min(track.end[i], seen.hi);
      const x = LABEL + (from - seen.lo) * pixels, width = Math.max((until - from) * pixels, track.ref[i] < 0 ? 0 : 0.6);
      if (width <= 0) continue;
      const second = track.second[i], color = track.color[i];
      if (color !== last) {
        context.fillStyle = colors.css[color];
        last = color;
      }
      const gap = width > 4 && track.ref[i] >= 0 ? 0.75 : 0;
      context.fillRect(x, y, width - gap, second < 0 ? height : height / 2);
      if (second >= 0) {
        context.fillStyle = colors.css[second];
        last = second;
        context.fillRect(x, y + height / 2, width - gap, height / 2);
      }
      this.boxes++;
      if (track.differs) {
        this.mark(track, i, x, width, y + height, pixels, seen);
        last = -1;
      }
      if (height >= 18 * TYPE && track.ref[i] >= 0 && width > 13 * TYPE) {
        this.label(track, i, x, y, width, height);
        last = -1;
      }
    }
  }

  // Below an action how it differs from the other timeline's: amber where it is elsewhere, red as far as it takes longer.
  mark({ differs, end }, i, x, width, bottom, pixels, seen) {
    const { context } = this, { longer, elsewhere } = DIFFERENCES, top = bottom + MARK.below;
    if (differs.elsewhere[i]) {
      context.fillStyle = elsewhere.color;
      context.fillRect(x, top, width, MARK.height);
    }
    const from = Math.max(x, LABEL + (end[i] - differs.longer[i] - seen.lo) * pixels);
    if (differs.longer[i] * pixels > 0.5 && from < x + width) {
      context.fillStyle = longer.color;
      context.fillRect(from, top, x + width - from, MARK.height);
    }
  }

  // The name of an action, in the longest form that fits.
  label(track, i, x, y, width, height) {
    const { context, header, colors } = this, { entry } = track, span = track.ref[i];
    const kind = header.kinds[entry.kind[span]];
    const halves = track.second[i] >= 0;
    const of = (color, forms, middle) => {
      const text = forms.find((form) => this.widthOf(form) < width - 4);
      if (text === undefined) return;
      context.fillStyle = colors.textOn(color);
      context.textAlign = "center";
      context.fillText(text, x + width / 2, middle);
    };
    if (halves) {
      of(track.color[i], [`${entry.stage[span]}F${entry.microbatch[span]}`, String(entry.microbatch[span])], y + height / 4);
      of(track.second[i], [`${entry.pair_stage[span]}B${entry.pair_microbatch[span]}`, String(entry.pair_microbatch[span])], y + (3 * height) / 4);
      return;
    }
    const short = entry.microbatch[span] >= 0 ? String(entry.microbatch[span]) : kind === "STEP" ? "step" : kind === "REDUCE_GRAD" ? "reduce" : "";
    of(track.color[i], [token(header, entry, span), short], y + height / 2);
  }

  widthOf(text) {
    let width = this.widths.get(text);
    if (width === undefined) {
      width = this.context.measureText(text).width;
      if (this.widths.size > 20000) this.widths.clear();
      this.widths.set(text, width);
    }
    return width;
  }

  // The mean colour of every column of pixels, from differences of sums.
  dense(track, seen, y, height) {
    const { colors, strip } = this, columns = Math.max(1, Math.ceil(this.plot));
    if (strip.width !== columns) {
      strip.width = columns;
      this.pixels = strip.getContext("2d").createImageData(columns, 1);
      this.marked = strip.getContext("2d").createImageData(columns, 1);
    }
    const data = this.pixels.data, marked = this.marked.data, [longer, elsewhere] = track.marks, [red, green, blue, time] = track.sums, { start, end } = track;
    const length = (seen.hi - seen.lo) / this.plot, count = start.length;
    const ground = [colors.red[colors.idle], colors.green[colors.idle], colors.blue[colors.idle]];
    const [longest, moved] = [DIFFERENCES.longer, DIFFERENCES.elsewhere].map(({ color }) => rgb(color));
    let at = track.after(seen.lo);
    let before = null;
    const sumsAt = (i, until) => {
      const share = i < count && until > start[i] && end[i] > start[i] ? (until - start[i]) / (end[i] - start[i]) : 0;
      const part = (sums) => sums[i] + (share ? share * (sums[i + 1] - sums[i]) : 0);
      return [part(red), part(green), part(blue), part(time), ...(track.differs ? [part(longer), part(elsewhere)] : [])];
    };
    before = sumsAt(at, seen.lo);
    for (let column = 0; column < columns; column++) {
      const until = seen.lo + (column + 1) * length;
      // steps that double, then a search between the last two
      if (at < count && end[at] <= until) {
        let step = 1;
        while (at + step < count && end[at + step] <= until) step *= 2;
        let lo = at + (step >> 1), hi = Math.min(at + step, count);
        while (lo < hi) {
          const middle = (lo + hi) >> 1;
          if (end[middle] > until) hi = middle;
          else lo = middle + 1;
        }
        at = lo;
      }
      const now = sumsAt(at, until), idle = Math.max(0, length - (now[3] - before[3]));
      for (let part = 0; part < 3; part++) data[4 * column + part] = (now[part] - before[part] + idle * ground[part]) / length;
      data[4 * column + 3] = 255;
      if (track.differs) {
        const share = [now[4] - before[4], now[5] - before[5]], sum = share[0] + share[1];
        for (let part = 0; part < 3; part++) marked[4 * column + part] = sum > 0 ? (share[0] * longest[part] + share[1] * moved[part]) / sum : 0;
        marked[4 * column + 3] = (255 * sum) / length;
      }
      before = now;
    }
    this.context.imageSmoothingEnabled = false;
    const put = (image, top, rows) => {
      strip.getContext("2d").putImageData(image, 0, 0);
      this.context.drawImage(strip, 0, 0, columns, 1, LABEL, top, columns, rows);
    };
    put(this.pixels, y, height);
    if (track.differs) put(this.marked, y + height + MARK.below, MARK.height);
    this.boxes++;
  }

  memory(row, top) {
    const { context, view } = this, { entry, rank } = row, { capacity_bytes: capacity } = entry, seen = view.seen(entry);
    const right = Math.min(this.x(entry.makespan_s, seen), LABEL + this.plot);
    const y = top + row.memory.y, height = row.memory.height, most = mostBytes(this.header);
    const place = (bytes) => y + height - (bytes / most) * (height - 4);
    const { parts } = row.memory, isSeen = right > LABEL;
    if (parts.length && isSeen) {
      // from above down: what is below of a component lies over it
      for (const [layer, part] of [...stackedOf(entry).entries()].reverse()) {
        this.steps(entry, rank, layer, place, right);
        context.lineTo(right, y + height);
        context.lineTo(LABEL, y + height);
        context.fillStyle = this.header.components[part.name];
        context.fill();
      }
    }
    context.strokeStyle = context.fillStyle = view.theme === "dark" ? "#b08fd0" : "#5b2f86";
    context.globalAlpha = 0.9;
    if (isSeen) this.steps(entry, rank, entry.memory_bytes, place, right);
    if (isSeen) context.stroke();
    if (!parts.length && isSeen) {
      context.lineTo(right, y + height);
      context.lineTo(LABEL, y + height);
      context.globalAlpha = 0.25;
      context.fill();
    }
    context.globalAlpha = 1;
    context.fillStyle = this.muted;
    context.textAlign = "left";
    const peak = peakOf(entry, rank);
    context.fillText(`peak ${formatHeld(this.header, peak.bytes)}`, 20 * TYPE, y + height / 2 - (capacity ? 6 * TYPE : 0));
    if (peak.time >= seen.lo && peak.time <= seen.hi) {
      context.beginPath();
      context.arc(this.x(peak.time, seen), place(peak.bytes), 3, 0, 2 * Math.PI);
      context.fill();
    }
    if (capacity && row.memory.height > 30 * TYPE) context.fillText(`of ${formatBytes(capacity)}`, 20 * TYPE, y + height / 2 + 8 * TYPE);
    if (capacity && capacity <= most) {
      context.strokeStyle = view.theme === "dark" ? "#ff9d5c" : "#b3400a";
      context.setLineDash([5, 4]);
      context.beginPath();
      context.moveTo(LABEL, place(capacity));
      context.lineTo(LABEL + this.plot, place(capacity));
      context.stroke();
      context.setLineDash([]);
    }
  }

  // The path of what a rank holds over the times that are seen: of a column's samples the highest, and the last.
  steps(entry, rank, held, place, right) {
    const { context, view } = this, { lo, hi } = entry.samples[rank], seen = view.seen(entry);
    const pixels = this.plot / (seen.hi - seen.lo);
    const columnOf = (i) => Math.floor((entry.memory_time[i] - seen.lo) * pixels);
    let i = lo;
    while (i < hi && entry.memory_time[i] <= seen.lo) i++;
    let now = i > lo ? held[i - 1] : 0;
    context.beginPath();
    context.moveTo(LABEL, place(now));
    while (i < hi && entry.memory_time[i] <= seen.hi) {
      const column = columnOf(i), x = LABEL + (entry.memory_time[i] - seen.lo) * pixels;
      let highest = held[i], last = highest, k = i + 1;
      for (; k < hi && columnOf(k) === column; k++) {
        last = held[k];
        if (last > highest) highest = last;
      }
      context.lineTo(x, place(now));
      context.lineTo(x, place(highest));
      if (last !== highest) context.lineTo(x, place(last));
      now = last;
      i = k;
    }
    context.lineTo(right, place(now));
  }

  // Where a span lies on the canvas, or null where its row is not there.
  boxOf(entry, span, rows, top) {
    const rank = this.view.shows.groups ? entry.group[entry.rank[span]] : entry.rank[span];
    const row = rows.find((each) => each.entry === entry && each.rank === rank);
    if (!row) return null;
    const place = row.tracks.find((each) => each.track.lane === entry.lane[span] && each.track.lo <= span && span < each.track.hi) ??
      (rank === entry.rank[span] ? row.tracks[0] : null);
    const seen = this.view.seen(entry);
    return place ? { y: top + place.y, height: place.height, left: this.x(entry.start[span], seen), right: this.x(entry.end[span], seen) } : null;
  }

  chain(spans, rows, top, entry, color) {
    const { context } = this, limit = 4 * this.plot, { lo, hi } = this.view.seen(entry);
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.beginPath();
    let last = null;
    for (const span of spans) {
      if (entry.end[span] < lo - (hi - lo) || entry.start[span] > hi + (hi - lo)) {
        last = null;
        continue;
      }
      const box = this.boxOf(entry, span, rows, top);
      if (!box) continue;
      const middle = box.y + box.height / 2;
      const left = Math.max(Math.min(box.left, limit), -limit), right = Math.max(Math.min(box.right, limit), -limit);
      if (last) {
        context.moveTo(last.x, last.y);
        context.lineTo(left, middle);
      }
      if (right - left > 3) context.rect(left, box.y + 0.75, right - left, box.height - 1.5);
      else {
        context.moveTo(left, middle);
        context.lineTo(Math.max(right, left + 1), middle);
      }
      last = { x: right, y: middle };
    }
    context.stroke();
    context.lineWidth = 1;
  }

  outline(entry, span, rows, top) {
    const box = this.boxOf(entry, span, rows, top);
    if (!box) return;
    this.context.strokeStyle = this.view.theme === "dark" ? "#ffffff" : "#000000";
    this.context.lineWidth = 3;
    this.context.strokeRect(box.left, box.y, Math.max(box.right - box.left, 1), box.height);
    this.context.lineWidth = 1;
  }

  findings(rows, top) {
    const { context } = this;
    for (const entry of this.header.timelines) {
      for (const finding of entry.findings) {
        if (finding.span < 0) continue;
        const box = this.boxOf(entry, finding.span, rows, top);
        if (!box || box.right < LABEL || box.left > LABEL + this.plot) continue;
        const x = Math.max((box.left + box.right) / 2, LABEL + 5);
        context.fillStyle = finding.severity === "error" ? "#d43d2a" : "#d48a00";
        context.strokeStyle = this.colors.ground;
        context.beginPath();
        context.moveTo(x - 6, box.y - 2);
        context.lineTo(x + 6, box.y - 2);
        context.lineTo(x, box.y + 8);
        context.closePath();
        context.fill();
        context.stroke();
      }
    }
  }
}

function criticalOf(entry) {
  entry.critical ??= criticalPath(entry);
  return entry.critical;
}

// The components of memory, each on those before it: a column of sums -> the component on top.
function stackedOf(entry) {
  if (!entry.stacked) {
    entry.stacked = new Map();
    let below = new Float64Array(entry.memory_bytes.length);
    for (const part of entry.memory_parts) {
      below = below.map((bytes, i) => bytes + part.bytes[i]);
      entry.stacked.set(below, part);
    }
  }
  return entry.stacked;
}

// What is usable is on the scale of memory up to so many times the most that is held: curves of less would be flat.
const LIMIT_SEEN = 5;

function mostBytes(header) {
  if (header.mostBytes === undefined) {
    let most = 1;
    for (const { memory_bytes } of header.timelines) for (const bytes of memory_bytes) if (bytes > most) most = bytes;
    const capacities = header.timelines.map((entry) => entry.capacity_bytes ?? 0);
    header.mostBytes = Math.max(most, ...capacities.filter((capacity) => capacity < LIMIT_SEEN * most));
  }
  return header.mostBytes;
}

// The most bytes of a rank, since when, and what runs then.
function peakOf(entry, rank) {
  entry.peaks ??= [];
  if (!entry.peaks[rank]) {
    const { lo, hi } = entry.samples[rank];
    let at = lo;
    for (let i = lo; i < hi; i++) if (entry.memory_bytes[i] > entry.memory_bytes[at]) at = i;
    const time = entry.memory_time[at];
    const compute = entry.tracks[rank].find((track) => entry.lanes[track.lane].role === "compute");
    let span = -1;
    for (let i = compute?.lo ?? 0; i < (compute?.hi ?? 0); i++) if (entry.start[i] <= time && time <= entry.end[i]) span = i;
    entry.peaks[rank] = { bytes: entry.memory_bytes[at], time, span };
  }
  return entry.peaks[rank];
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
}

function unitOf(header, length, end) {
  if (header.unit === "unit") return { name: "units", scale: 1 };
  const units = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]];
  const [name, scale] = units.find(([, each]) => end >= each) ?? units[3];
  const fine = units.find(([, each]) => length >= each * 0.02) ?? units[3];
  return fine[1] < scale ? { name: fine[0], scale: fine[1] } : { name, scale };
}

function formatTime(header, seconds, digits = 4) {
  if (header.unit === "unit") return `${Number(seconds.toPrecision(digits + 2))} units`;
  const size = Math.abs(seconds);
  const [name, scale] = [["s", 1], ["ms", 1e-3], ["us", 1e-6]].find(([, each]) => size >= each) ?? (size ? ["ns", 1e-9] : ["s", 1]);
  return `${Number((seconds / scale).toPrecision(digits))} ${name}`;
}

// Two times with as many digits as show the difference.
function fromTo(header, start, end) {
  const digits = end > start ? Math.min(Math.max(4, Math.ceil(Math.log10(end / (end - start))) + 3), 12) : 4;
  return `${formatTime(header, start, digits)} to ${formatTime(header, end, digits)}`;
}

// Of a schedule without a model: forwards whose backward is still to come.
function formatHeld(header, value) {
  return header.library ? `${Number(value.toPrecision(4))} in flight` : formatBytes(value);
}

function formatBytes(bytes) {
  const [name, scale] = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(([, each]) => bytes >= each) ?? ["B", 1];
  return `${Number((bytes / scale).toPrecision(4))} ${name}`;
}
