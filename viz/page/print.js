// A page on paper: a table whose head is the axis of time, which is repeated on every sheet, and whose rows are ranks,
// none of which is cut in two.

const PAPER = { width: 800, scale: 2 }; // pixels that are as wide as a sheet, and dots for each
const MOST_PRINTED = 20000; // pixels of height

class Paper {
  constructor(page) {
    this.page = page;
  }

  // Draws all ranks in the light theme, whatever is seen on the screen.
  fill() {
    const { page } = this, { view, painter } = page, table = element("paper");
    this.before = { theme: view.theme, scroll: view.scroll };
    view.theme = "light";
    painter.paper = { ...PAPER, height: 0 }; // no room in height, so rows have the least
    page.repaint();
    const ranks = ranksOf(page.rows);
    table.tHead.append(rowOf(this.drawn(0, 1, 0, AXIS, "time")));
    for (const { y, height, name } of ranks) {
      if (y + height > MOST_PRINTED) {
        const left = ranks.filter((each) => each.y >= y).length;
        table.tBodies[0].append(rowOf(`${left} further ranks, from rank ${name} on, are not printed. Fold them (f), or show one of a stage (g).`));
        break;
      }
      table.tBodies[0].append(rowOf(this.drawn(y, height, AXIS, height, `rank ${name}`)));
    }
  }

  clear() {
    const { page } = this, table = element("paper");
    for (const part of [table.tHead, table.tBodies[0]]) part.replaceChildren();
    page.painter.paper = null;
    Object.assign(page.view, this.before);
    page.repaint();
  }

  // An image of `height` pixels from `top` on of the picture of the rows that lie within `room` pixels from `y` on. Not a
  // canvas: these are not repeated on every sheet, and not drawn as wide as they are.
  drawn(y, room, top, height, alt) {
    const { painter, view, rows, paints } = this.page, copy = document.createElement("canvas"), { scale, width } = PAPER;
    painter.paper = { ...PAPER, height: AXIS + room };
    painter.fit();
    view.scroll = y;
    painter.draw(view, rows, paints);
    copy.width = width * scale;
    copy.height = Math.round(height * scale);
    copy.getContext("2d").drawImage(painter.canvas, 0, -top * scale);
    return Object.assign(new Image(), { src: copy.toDataURL(), alt });
  }
}

// Of every rank where its rows begin, and their height with the gap below them.
function ranksOf(rows) {
  const ranks = [];
  for (const row of rows) {
    if (ranks.at(-1)?.name !== row.name) ranks.push({ name: row.name, y: row.y });
  }
  ranks.forEach((rank, at) => (rank.height = (ranks[at + 1]?.y ?? rows.total) - rank.y));
  return ranks;
}

function rowOf(content) {
  const row = document.createElement("tr"), cell = document.createElement("td");
  cell.append(content);
  row.append(cell);
  return row;
}
