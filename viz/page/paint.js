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

  fit() {
    const { canvas } = this, scale = window.devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = canvas.parentElement;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    Object.assign(this, { width, height, scale, plot: Math.max(width - LABEL - 8, 10) });
  }

  x(time) {
    return LABEL + ((time - this.view.lo) / (this.view.hi - this.view.lo)) * this.plot;
  }

  timeAt(x) {
    return this.view.lo + ((x - LABEL) / this.plot) * (this.view.hi - this.view.lo);
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

  axis() {
    const { context, view } = this, unit = unitOf(this.header, view.hi - view.lo, view.end);
    context.fillStyle = this.colors.ground;
    context.fillRect(0, 0, this.width, AXIS);
    context.strokeStyle = this.rule;
    context.fillStyle = this.muted;
    context.textAlign = "center";
    const step = niceStep(((view.hi - view.lo) / Math.max(this.plot / (110 * TYPE), 1)) / unit.scale);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    context.beginPath();
    for (let k = Math.ceil(view.lo / unit.scale / step - 1e-9); k * step * unit.scale <= view.hi * (1 + 1e-12); k++) {
      const x = Math.round(this.x(k * step * unit.scale)) + 0.5;
      context.moveTo(x, AXIS - 6);
      context.lineTo(x, AXIS);
      const text = (k * step).toFixed(digits);
      if (x + this.widthOf(text) / 2 < this.width) context.fillText(text, x, AXIS / 2);
    }
    context.moveTo(0, AXIS - 0.5);
    context.lineTo(this.width, AXIS - 0.5);
    context.stroke();
    context.textAlign = "left";
    context.fillText(unit.name, 10, AXIS / 2);
  }

  row(row, top) {
    const { context } = this;
    context.textAlign = "left";
    context.fillStyle = this.ink;
    const first = row.tracks[0];
    const middle = top + row.y + (first ? first.height : row.height) / 2;
    if (!row.folded || row.height >= 10 * TYPE) context.fillText(`${row.folded ? "▸" : "▾"} ${row.label[0]}`, 8, middle);
    if (row.label[1] && row.height > 26 * TYPE) {
      context.fillStyle = this.muted;
      context.fillText(row.label[1], 20 * TYPE, middle + 14 * TYPE);
    }
    for (const place of row.tracks) this.track(place, top);
    if (row.memory) this.memory(row, top);
  }

  track(place, top) {
    const { context, view, colors } = this, { track, height } = place, y = top + place.y;
    const lo = track.ready(this.paints).after(view.lo);
    let hi = track.after(view.hi, lo);
    if (hi < track.start.length && track.start[hi] < view.hi) hi++;
    if (place.role === "compute") {
      context.fillStyle = colors.css[colors.idle];
      context.fillRect(LABEL, y, this.plot, height);
    }
    if (hi - lo > this.plot / 3) {
      this.dense(track, y, height);
      return;
    }
    let last = -1;
    const pixels = this.plot / (view.hi - view.lo);
    for (let i = lo; i < hi; i++) {
      const from = Math.max(track.start[i], view.lo), until = Math.min(track.end[i], view.hi);
      const x = LABEL + (from - view.lo) * pixels, width = Math.max((until - from) * pixels, track.ref[i] < 0 ? 0 : 0.6);
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
      if (height >= 18 * TYPE && track.ref[i] >= 0 && width > 13 * TYPE) {
        this.label(track, i, x, y, width, height);
        last = -1;
      }
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
  dense(track, y, height) {
    const { view, colors, strip } = this, columns = Math.max(1, Math.ceil(this.plot));
    if (strip.width !== columns) {
      strip.width = columns;
      this.pixels = strip.getContext("2d").createImageData(columns, 1);
    }
    const data = this.pixels.data, [red, green, blue, time] = track.sums, { start, end } = track;
    const length = (view.hi - view.lo) / this.plot, count = start.length;
    const ground = [colors.red[colors.idle], colors.green[colors.idle], colors.blue[colors.idle]];
    let at = track.after(view.lo);
    let before = null;
    const sumsAt = (i, until) => {
      const share = i < count && until > start[i] && end[i] > start[i] ? (until - start[i]) / (end[i] - start[i]) : 0;
      const part = (sums) => sums[i] + (share ? share * (sums[i + 1] - sums[i]) : 0);
      return [part(red), part(green), part(blue), part(time)];
    };
    before = sumsAt(at, view.lo);
    for (let column = 0; column < columns; column++) {
      const until = view.lo + (column + 1) * length;
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
      before = now;
    }
    strip.getContext("2d").putImageData(this.pixels, 0, 0);
    this.context.imageSmoothingEnabled = false;
    this.context.drawImage(strip, 0, 0, columns, 1, LABEL, y, columns, height);
    this.boxes++;
  }

  memory(row, top) {
    const { context, view } = this, { entry, rank } = row;
    const y = top + row.memory.y, height = row.memory.height, most = mostBytes(this.header);
    const place = (bytes) => y + height - (bytes / most) * (height - 4);
    const { parts } = row.memory;
    if (parts.length) {
      // from above down: what is below of a component lies over it
      for (const [layer, part] of [...stackedOf(entry).entries()].reverse()) {
        this.steps(entry, rank, layer, place);
        context.lineTo(LABEL + this.plot, y + height);
        context.lineTo(LABEL, y + height);
        context.fillStyle = this.header.components[part.name];
        context.fill();
      }
    }
    context.strokeStyle = context.fillStyle = view.theme === "dark" ? "#b08fd0" : "#5b2f86";
    context.globalAlpha = 0.9;
    this.steps(entry, rank, entry.memory_bytes, place);
    context.stroke();
    if (!parts.length) {
      context.lineTo(LABEL + this.plot, y + height);
      context.lineTo(LABEL, y + height);
      context.globalAlpha = 0.25;
      context.fill();
    }
    context.globalAlpha = 1;
    context.fillStyle = this.muted;
    context.textAlign = "left";
    const peak = peakOf(entry, rank);
    context.fillText(`peak ${formatHeld(this.header, peak.bytes)}`, 20 * TYPE, y + height / 2);
    if (peak.time >= view.lo && peak.time <= view.hi) {
      context.beginPath();
      context.arc(this.x(peak.time), place(peak.bytes), 3, 0, 2 * Math.PI);
      context.fill();
    }
    if (entry.capacity_bytes) {
      context.strokeStyle = view.theme === "dark" ? "#ff9d5c" : "#b3400a";
      context.setLineDash([5, 4]);
      context.beginPath();
      context.moveTo(LABEL, place(entry.capacity_bytes));
      context.lineTo(LABEL + this.plot, place(entry.capacity_bytes));
      context.stroke();
      context.setLineDash([]);
    }
  }

  // The path of what a rank holds over the times that are seen: of a column's samples the highest, and the last.
  steps(entry, rank, held, place) {
    const { context, view } = this, { lo, hi } = entry.samples[rank], pixels = this.plot / (view.hi - view.lo);
    const columnOf = (i) => Math.floor((entry.memory_time[i] - view.lo) * pixels);
    let i = lo;
    while (i < hi && entry.memory_time[i] <= view.lo) i++;
    let now = i > lo ? held[i - 1] : 0;
    context.beginPath();
    context.moveTo(LABEL, place(now));
    while (i < hi && entry.memory_time[i] <= view.hi) {
      const column = columnOf(i), x = LABEL + (entry.memory_time[i] - view.lo) * pixels;
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
    context.lineTo(LABEL + this.plot, place(now));
  }

  // Where a span lies on the canvas, or null where its row is not there.
  boxOf(entry, span, rows, top) {
    const rank = this.view.shows.groups ? entry.group[entry.rank[span]] : entry.rank[span];
    const row = rows.find((each) => each.entry === entry && each.rank === rank);
    if (!row) return null;
    const place = row.tracks.find((each) => each.track.lane === entry.lane[span] && each.track.lo <= span && span < each.track.hi) ??
      (rank === entry.rank[span] ? row.tracks[0] : null);
    return place ? { y: top + place.y, height: place.height, left: this.x(entry.start[span]), right: this.x(entry.end[span]) } : null;
  }

  chain(spans, rows, top, entry, color) {
    const { context } = this, limit = 4 * this.plot;
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.beginPath();
    let last = null;
    for (const span of spans) {
      if (entry.end[span] < this.view.lo - (this.view.hi - this.view.lo) || entry.start[span] > this.view.hi + (this.view.hi - this.view.lo)) {
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

function mostBytes(header) {
  if (header.mostBytes === undefined) {
    let most = 1;
    for (const entry of header.timelines) {
      for (const bytes of entry.memory_bytes) if (bytes > most) most = bytes;
      most = Math.max(most, entry.capacity_bytes ?? 0);
    }
    header.mostBytes = most;
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
  return header.library ? `${value} in flight` : formatBytes(value);
}

function formatBytes(bytes) {
  const [name, scale] = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(([, each]) => bytes >= each) ?? ["B", 1];
  return `${Number((bytes / scale).toPrecision(4))} ${name}`;
}
