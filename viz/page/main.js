// The page: a view becomes a picture, a legend and words.

const element = (id) => document.getElementById(id);

async function begin() {
  let header;
  try {
    header = await unpack(element("content").textContent);
  } catch (error) {
    element("details").textContent = `The page cannot be shown: ${error.message}`;
    return;
  }
  window.page = new Page(header);
}

class Page {
  constructor(header) {
    this.header = header;
    this.frames = []; // milliseconds of script of the last frames
    this.painter = new Painter(element("canvas"), header);
    if (header.library) {
      this.sliders = new Sliders(this);
      return;
    }
    this.load();
  }

  // Shows the timelines that the header has now; where it had others before, the view of them.
  load() {
    const { header } = this, isFirst = !this.view;
    const shares = isFirst ? null : [this.view.lo / this.view.end, this.view.hi / this.view.end];
    const before = this.view;
    this.view = new View(header);
    if (isFirst) this.view.hash = location.hash;
    else {
      const { theme, shows, folded, query, scroll, critical } = before;
      Object.assign(this.view, { theme, shows, folded, query, scroll, critical });
      this.view.set(shares[0] * this.view.end, shares[1] * this.view.end);
    }
    header.mostBytes = undefined;
    const sources = header.timelines.map((entry) => entry.source), isOne = new Set(sources).size < sources.length;
    for (const entry of header.timelines) {
      entry.letter = isOne ? "AB"[entry.number] : "";
      entry.label = isOne ? `${entry.source} ${entry.letter}` : entry.source;
    }
    this.painter.known = null;
    this.tracks = header.timelines.map((entry) =>
      entry.ranks.map((_, rank) =>
        entry.tracks[rank].map(({ lane, lo, hi }) => {
          const none = { lo: 0, hi: 0 };
          return new Track(entry, rank, lane, lo, hi, entry.lanes[lane].role === "compute" ? entry.gaps[rank] : none);
        }),
      ),
    );
    this.describe();
    if (isFirst) listen(this);
    this.repaint();
  }

  // Titles, the legend and the switches.
  describe() {
    const { header } = this, titleOf = ({ letter, title, source }) => (letter ? `${letter}: ${title || source}` : title);
    const titles = [...new Set(header.timelines.map(titleOf).filter(Boolean))];
    element("title").textContent = titles.join(" / ") || "A training step";
    const sentences = header.timelines.map((entry) => {
      const worst = entry.bubbles.reduce((at, bubble, i) => (bubble > entry.bubbles[at] + 1e-9 ? i : at), 0);
      const bubble = entry.ranks.length ? `, bubble ${(100 * entry.bubbles[worst]).toFixed(1)}% on rank ${entry.ranks[worst]}` : "";
      const [{ makespan_s: first, label }] = header.timelines, times = entry.makespan_s / first;
      const against = entry.number > 0 && first > 0 ? `, ${Number(times.toPrecision(3))} x ${label}` : "";
      return `${entry.label}: ${formatTime(header, entry.makespan_s)}${bubble}${against}`;
    });
    if (header.note) sentences.push(header.note);
    this.sentences = sentences;
    const used = new Set(header.kinds.filter((_, at) => header.timelines.some(({ kind }) => kind.includes(at))));
    if (used.delete("OVERLAP_F_B")) used.add("F").add("B");
    const legend = element("legend");
    legend.replaceChildren();
    element("findings").replaceChildren();
    this.used = Object.keys(header.names).filter((kind) => used.has(kind));
    this.legendOfKinds = document.createElement("span");
    this.legendOfCauses = document.createElement("span");
    this.legendOfDifferences = document.createElement("span");
    this.legendOfParts = document.createElement("span");
    legend.append(this.legendOfKinds, this.legendOfDifferences, this.legendOfCauses, this.legendOfParts);
    for (const [index, entry] of header.timelines.entries()) {
      for (const finding of entry.findings) {
        const button = document.createElement("button");
        button.className = finding.severity;
        button.textContent = `${finding.severity}: ${finding.rule} at ${finding.where}`;
        button.title = `${finding.what}\n${finding.hint}`;
        button.onclick = () => finding.span >= 0 && this.choose(index, finding.span);
        element("findings").append(button);
      }
    }
  }

  get chosenEntry() {
    return this.header.timelines[this.view.chosen[0]];
  }

  goTo(span) {
    if (span >= 0) this.choose(this.view.chosen[0], span);
  }

  chooseFirst() {
    const entry = this.header.timelines[0];
    const track = this.tracks[0][0]?.[0];
    if (track) this.choose(entry.number, track.lo);
  }

  neighbour(step) {
    const entry = this.chosenEntry, span = this.view.chosen[1] + step;
    const same = span >= 0 && span < entry.num_spans && entry.rank[span] === entry.rank[span - step] && entry.lane[span] === entry.lane[span - step];
    if (same) this.choose(entry.number, span);
  }

  whole() {
    this.view.set(0, this.view.end);
    this.view.scroll = 0;
    this.redraw();
  }

  fold(name) {
    const { folded } = this.view;
    if (!folded.delete(name)) folded.add(name);
    this.repaint();
  }

  foldAll() {
    const names = this.header.timelines.flatMap((entry) => entry.ranks);
    this.view.folded = new Set(this.view.folded.size ? [] : names);
    this.repaint();
  }

  toggle(name) {
    this.view.shows[name] = !this.view.shows[name];
    this.repaint();
  }

  toggleCritical() {
    this.view.critical = !this.view.critical;
    this.redraw();
  }

  toggleTheme() {
    this.view.theme = this.view.theme === "dark" ? "light" : "dark";
    this.repaint();
  }

  scrollBy(pixels) {
    const most = Math.max(0, this.rows.total - (this.painter.height - AXIS));
    this.view.scroll = Math.min(Math.max(this.view.scroll + pixels, 0), most);
  }

  // Colours and rows anew, then a picture.
  repaint() {
    const { header, view } = this;
    document.documentElement.dataset.theme = view.theme;
    this.hits = header.timelines.map((entry) => found(header, entry, view.query));
    const stretches = header.timelines.map((entry) => view.stretch(entry));
    this.paints = { header, colors: new Colors(header, view.theme, view.shows.causes), hits: this.hits, stretches };
    this.arrange();
    if (element("search").value !== view.query) element("search").value = view.query;
    const count = this.hits.reduce((sum, hits) => sum + (hits ? hits.reduce((a, b) => a + b, 0) : 0), 0);
    element("count").textContent = view.query.trim() ? `${count} found` : "";
    for (const name of Object.keys(view.shows)) element(`show-${name}`).setAttribute("aria-pressed", view.shows[name]);
    const { own } = view;
    element("notes").textContent = [...this.sentences, ...(own ? ["each on its own time axis"] : [])].join(" · ");
    element("show-own").hidden = header.timelines.length < 2;
    const parts = header.timelines.flatMap((entry) => entry.memory_parts);
    element("show-components").hidden = !parts.length;
    const names = view.shows.components && view.shows.memory ? new Set(parts.map((part) => part.name)) : [];
    this.legendOfKinds.replaceChildren(...this.used.map((kind) => swatch(fillsOf(header, view.theme, kind)[0], header.names[kind])));
    this.legendOfParts.replaceChildren(...[...names].map((name) => swatch(header.components[name], name)));
    const differences = header.timelines.length > 1 ? ["longer", "elsewhere"].map((name) => DIFFERENCES[name]) : [];
    this.legendOfDifferences.replaceChildren(...differences.map(({ color, name }) => swatch(color, `below an action: ${name}`)));
    this.legendOfCauses.replaceChildren(...(view.shows.causes ? this.causesSeen() : []));
    this.say();
    this.redraw();
  }

  // Rows from top to bottom, in the type of the window's width; where they leave room they are made up to twice as high.
  arrange() {
    const { header, view, tracks } = this;
    setType(this.painter.room.width, view.own ? header.timelines.length : 1);
    const room = this.painter.room.height - AXIS;
    this.rows = rowsOf(header, view, tracks, 1);
    const stretch = Math.min(2, room / this.rows.total);
    if (stretch > 1.05) this.rows = rowsOf(header, view, tracks, stretch);
  }

  // The causes of idle time that there are, for the legend, those of one colour together.
  causesSeen() {
    const { header, view } = this, at = view.theme === "dark" ? 1 : 0, seen = new Map();
    Object.entries(header.causes).forEach(([cause, pair], index) => {
      const names = header.timelines.filter((entry) => entry.gap_cause.includes(index)).map((entry) => causeIn(entry, cause));
      if (names.length) seen.set(pair[at], new Set([...(seen.get(pair[at]) ?? []), ...names]));
    });
    return [...seen].map(([color, names]) => swatch(color, `idle: ${[...names].join(" / ")}`));
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.picture();
    });
  }

  picture() {
    const began = performance.now();
    this.painter.fit();
    this.scrollBy(0);
    this.painter.draw(this.view, this.rows, this.paints);
    element("critical").setAttribute("aria-pressed", this.view.critical);
    this.frames.push(performance.now() - began);
    if (this.frames.length > 2000) this.frames.splice(0, 1000);
    clearTimeout(this.later);
    this.later = setTimeout(() => this.remember(), 250);
  }

  remember() {
    try {
      history.replaceState(null, "", this.sliders ? `${this.view.hash}&${this.sliders.hash}` : this.view.hash);
    } catch {
      // a frame without an address of its own: the view is not kept
    }
  }

  // What lies at a place: { row, place, item, span, gap }.
  at(x, y) {
    const { painter, view } = this;
    if (y < AXIS) return null;
    const height = y - AXIS + view.scroll;
    const row = this.rows.find((each) => height >= each.y && height < each.y + each.height);
    if (!row) return null;
    if (row.memory && x >= LABEL && height >= row.memory.y && height < row.memory.y + row.memory.height) {
      return { row, time: painter.timeAt(x, view.seen(row.entry)) };
    }
    const place = row.tracks.find((each) => height >= each.y && height < each.y + each.height + 1);
    if (!place || x < LABEL) return { row };
    const track = place.track.ready(this.paints), seen = view.seen(row.entry), time = painter.timeAt(x, seen);
    const slack = (2 * (seen.hi - seen.lo)) / painter.plot;
    let i = track.after(time - slack);
    while (i + 1 < track.start.length && track.end[i] < time && track.start[i + 1] <= time) i++;
    if (i >= track.start.length || track.start[i] > time + slack) return { row, place };
    return { row, place, ref: track.ref[i] };
  }

  point(x, y) {
    const at = x < 0 ? null : this.at(x, y), tip = element("tip");
    element("canvas").style.cursor = at?.row && x < LABEL ? "pointer" : at?.ref >= 0 ? "default" : "grab";
    if (!at || (at.ref === undefined && at.time === undefined)) {
      tip.hidden = true;
      return;
    }
    const lines = at.time === undefined ? this.words(at.row.entry, at.ref) : memoryWordsOf(this.header, at.row, at.time);
    tip.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.min(x + 14, this.painter.width - width - 4)}px`;
    tip.style.top = `${y + 18 + height > this.painter.height ? y - height - 10 : y + 18}px`;
  }

  words(entry, ref) {
    return wordsOf(this.header, entry, ref);
  }

  click(x, y) {
    const at = this.at(x, y);
    element("canvas").focus();
    if (at?.row && x < LABEL) {
      this.fold(at.row.name);
    } else if (at?.ref >= 0) this.choose(at.row.entry.number, at.ref, false);
    else if (at?.ref < 0 && at.row.entry.gap_span[-1 - at.ref] >= 0) this.choose(at.row.entry.number, at.row.entry.gap_span[-1 - at.ref]);
    else {
      this.view.chosen = null;
      this.say();
      this.redraw();
    }
  }

  choose(timeline, span, moves = true) {
    const { view } = this, entry = this.header.timelines[timeline];
    view.chosen = [timeline, span];
    if (moves) {
      view.show(entry, span);
      const rank = view.shows.groups ? entry.group[entry.rank[span]] : entry.rank[span];
      const row = this.rows.find((each) => each.entry === entry && each.rank === rank);
      const room = this.painter.height - AXIS;
      if (row && (row.y < view.scroll || row.y + row.height > view.scroll + room)) view.scroll = Math.max(0, row.y - room / 3);
    }
    this.say();
    this.redraw();
  }

  // The chosen action in words, with what it waited for and what waited for it.
  say() {
    const details = element("details"), { view, header } = this;
    if (!view.chosen) {
      details.replaceChildren("Click an action for what it waited for; c shows the critical path, ? all keys.");
      return;
    }
    const [timeline, span] = view.chosen, entry = header.timelines[timeline];
    const lines = this.words(entry, span).map((line) => Object.assign(document.createElement("div"), { textContent: line }));
    const causes = [], links = (label, spans) => {
      const line = document.createElement("div");
      if (!spans.length) return line;
      line.append(`${label} `);
      for (const each of spans.slice(0, 8)) {
        const button = document.createElement("button");
        button.textContent = `${token(header, entry, each)} @${entry.ranks[entry.rank[each]]}`;
        button.onclick = () => this.choose(timeline, each);
        line.append(button);
      }
      if (spans.length > 8) line.append(` and ${spans.length - 8} more`);
      return line;
    };
    const chain = chainOf(entry, span), at = chain.indexOf(span);
    causes.push(links("waited for", [...waitsOf(entry, span)].sort((a, b) => entry.end[b] - entry.end[a])));
    causes.push(links("waited on by", [...laterOf(entry, span)].sort((a, b) => entry.start[a] - entry.start[b])));
    causes.push(Object.assign(document.createElement("div"), { textContent: `in a chain of ${chain.length}: ${at} led to it, ${chain.length - at - 1} follow` }));
    details.replaceChildren(...[lines, causes].map((each) => {
      const column = document.createElement("div");
      column.append(...each);
      return column;
    }));
  }

  next(step) {
    const { view, header } = this, all = [];
    header.timelines.forEach((entry, number) => {
      const hits = this.hits[number];
      for (let i = 0; hits && i < hits.length; i++) if (hits[i]) all.push([entry.start[i], number, i]);
    });
    if (!all.length) return;
    all.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
    const now = view.chosen ? all.findIndex(([, number, span]) => number === view.chosen[0] && span === view.chosen[1]) : -1;
    const [, number, span] = all[now < 0 ? (step > 0 ? 0 : all.length - 1) : (now + step + all.length) % all.length];
    this.choose(number, span);
  }
}

function swatch(color, text) {
  const item = document.createElement("span"), box = document.createElement("i");
  item.className = "swatch";
  box.style.background = color;
  item.append(box, text);
  return item;
}

begin();
