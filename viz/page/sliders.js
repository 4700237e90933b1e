// Controls of a page of schedules: which one, of how many ranks and microbatches, and how long its actions last.

class Sliders {
  constructor(page) {
    Object.assign(this, { page, header: page.header });
    const { names } = this.header.library;
    const form = element("sliders");
    form.hidden = false;
    for (const [id, first] of [["name-a", null], ["name-b", "compare with"]]) {
      const list = element(id);
      if (first) list.append(Object.assign(document.createElement("option"), { value: "", textContent: `${first} ...` }));
      names.forEach((name, at) => list.append(Object.assign(document.createElement("option"), { value: String(at), textContent: name })));
      list.onchange = () => this.change();
    }
    for (const name of ["p", "v", "m"]) element(`size-${name}`).oninput = () => this.change();
    for (const name of ["F", "I", "W", "send"]) element(`time-${name}`).oninput = () => this.change();
    this.show(location.hash);
  }

  // The schedules and times that an address says; what it leaves out is as at first.
  show(hash) {
    this.wanted = { a: { name: this.header.library.entries[0].name, p: 4, v: 2, m: 8 }, b: null, F: 1, I: 1, W: 1, send: 0 };
    this.read(hash);
    element("name-a").value = String(this.wanted.a.name);
    element("name-b").value = this.wanted.b === null ? "" : String(this.wanted.b);
    for (const name of ["F", "I", "W", "send"]) element(`time-${name}`).value = String(this.wanted[name]);
    this.offer();
    this.change();
  }

  // The sizes that there are of a schedule, and of those the nearest to what was wanted.
  sizes(name, axis, fixed) {
    const fits = (entry) => entry.name === name && Object.keys(fixed).every((each) => entry[each] === fixed[each]);
    return [...new Set(this.header.library.entries.filter(fits).map((entry) => entry[axis]))].sort((a, b) => a - b);
  }

  nearest(name, wanted) {
    const found = {};
    for (const axis of ["p", "v", "m"]) {
      const sizes = this.sizes(name, axis, found);
      found[axis] = sizes.reduce((best, size) => (Math.abs(size - wanted[axis]) < Math.abs(best - wanted[axis]) ? size : best));
    }
    return found;
  }

  // Sliders over the places of what there is.
  offer() {
    const { a } = this.wanted, chosen = this.nearest(a.name, a), fixed = {};
    Object.assign(a, chosen);
    for (const axis of ["p", "v", "m"]) {
      const sizes = this.sizes(a.name, axis, fixed), slider = element(`size-${axis}`);
      fixed[axis] = chosen[axis];
      slider.max = String(sizes.length - 1);
      slider.value = String(sizes.indexOf(chosen[axis]));
      slider.disabled = sizes.length < 2;
      slider.sizes = sizes;
      element(`says-${axis}`).textContent = String(chosen[axis]);
    }
  }

  change() {
    const { wanted } = this, name = Number(element("name-a").value);
    const given = {};
    for (const axis of ["p", "v", "m"]) {
      const slider = element(`size-${axis}`);
      given[axis] = slider.sizes[Number(slider.value)] ?? wanted.a[axis];
    }
    wanted.a = { name, ...given };
    this.offer();
    wanted.b = element("name-b").value === "" ? null : Number(element("name-b").value);
    for (const each of ["F", "I", "W", "send"]) {
      wanted[each] = Number(element(`time-${each}`).value);
      element(`says-${each}`).textContent = String(wanted[each]);
    }
    this.simulate();
  }

  simulate() {
    const { wanted, header } = this, { F, I, W, send } = wanted, timelines = [];
    const chosen = [wanted.a, ...(wanted.b === null ? [] : [{ name: wanted.b, ...this.nearest(wanted.b, wanted.a) }])];
    for (const [number, each] of chosen.entries()) {
      const at = header.library.entries.findIndex((entry) => ["name", "p", "v", "m"].every((key) => entry[key] === each[key]));
      const title = `${header.library.names[each.name]}: p ${each.p}, m ${each.m}${each.v > 1 ? `, v ${each.v}` : ""}`;
      const { findings, share } = header.library.entries[at], name = header.library.names[each.name];
      const actions = this.settled(at, { F: F * share, I: I * share, W: W * share, send });
      timelines.push(timelineOf(header, actions, { name, title, number, findings, share }));
    }
    header.timelines = timelines;
    this.page.load();
  }

  // The actions of a schedule with their times, rank by rank as it lists them.
  settled(at, durations) {
    return settle(actionsOf(rowsOfSchedule(this.header, at)), durations);
  }

  get hash() {
    const { a, b, F, I, W, send } = this.wanted;
    return `schedule=${[a.name, a.p, a.v, a.m, b ?? ""].join(",")}&times=${[F, I, W, send].join(",")}`;
  }

  read(hash) {
    const parts = Object.fromEntries(hash.replace(/^#/, "").split("&").map((part) => part.split("=")));
    const numbers = (text) => (text ?? "").split(",").map((each) => (each === "" ? null : Number(each)));
    const [name, p, v, m, b] = numbers(parts.schedule), known = this.header.library.names.length;
    if (Number.isInteger(name) && name >= 0 && name < known && [p, v, m].every(Number.isFinite)) {
      this.wanted.a = { name, p, v, m };
      if (Number.isInteger(b) && b >= 0 && b < known) this.wanted.b = b;
    }
    const times = numbers(parts.times);
    if (times.length === 4 && times.every((time) => time !== null && time >= 0 && time <= 10)) {
      [this.wanted.F, this.wanted.I, this.wanted.W, this.wanted.send] = times;
    }
  }
}
