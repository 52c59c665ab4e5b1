
// The texts, colours, tables and the panel of a call stack. pictures.js follows, in the same scope.

const chosen = { view: 0, snapshot: 0, stack: null };
const OTHER = 0;
const MIB = 1 << 20;

// ---- Text and elements

function mebibytes(bytes) {
  const number = bytes / MIB;
  const digits = number === 0 || Math.abs(number) >= 0.1 ? 1 : 4;
  return number.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + " MiB";
}

function signed(bytes) {
  return (bytes > 0 ? "+" : "") + mebibytes(bytes);
}

// ---- Colours

const PALETTE = ["page", "panel", "text", "soft", "line", "accent", "other", "unknown", "hatch", "lightness", "leak-lightness"];

// Leaks have reds and oranges; every other stack a colour between yellow-green and pink.
function colour(number) {
  const stack = data.stacks[number];
  if (number === OTHER) return palette.other;
  if (stack.leak) return `hsl(${(number * 23) % 42} 85% ${palette["leak-lightness"]})`;
  if (!stack.known) return palette.unknown;
  return `hsl(${75 + ((number * 97) % 250)} ${32 + (number % 3) * 12}% ${palette.lightness})`;
}

function shade(context, number) {
  context.fillStyle = colour(number);
  context.globalAlpha = chosen.stack === null || chosen.stack === number ? 1 : 0.25;
}

function swatch(number) {
  const box = make("span", undefined, "swatch");
  box.style.background = colour(number);
  box.dataset.stack = number;
  return box;
}

// ---- A call stack, and the panel that shows its frames

function stackButton(number) {
  const button = make("button", undefined, "stack");
  button.type = "button";
  button.append(swatch(number), data.stacks[number].title);
  button.addEventListener("click", () => select(number));
  return button;
}

function select(number) {
  chosen.stack = number;
  const panel = byId("stack");
  panel.hidden = number === null;
  if (number !== null) {
    const stack = data.stacks[number];
    byId("stack-title").textContent = stack.title;
    const facts = [];
    if (stack.leak) facts.push("Its live bytes never fell and still grow.");
    if (stack.native && stack.frames.length) facts.push(`C++ frames: ${stack.native}.`);
    if (stack.frames.length) facts.push("The innermost call comes first; calls of the program stand out.");
    byId("stack-facts").textContent = facts.join(" ");
    byId("stack-frames").replaceChildren(
      ...stack.frames.map((frame) => {
        const text = data.frames[frame];
        return make("li", text.slice(1), text[0] === "*" ? "" : "library");
      }),
    );
  }
  drawPictures();
}

// ---- Tables

function table(caption, note, heads, rows) {
  const box = make("div", undefined, "scroll");
  const element = make("table");
  const title = make("caption");
  title.append(make("b", caption), note ? " " + note : "");
  const head = make("tr");
  const isText = (column) => rows.length > 0 && Array.isArray(rows[0][column]);
  heads.forEach((text, column) => head.append(Object.assign(make("th", text, isText(column) ? "text" : ""), { scope: "col" })));
  const top = make("thead");
  top.append(head);
  const body = make("tbody");
  rows.forEach((cells) => {
    const row = make("tr");
    cells.forEach((cell) => {
      const place = make("td", undefined, typeof cell !== "string" ? "text" : cell.includes(ARROW) ? "number path" : "number");
      place.append(...(Array.isArray(cell) ? cell : [cell]));
      row.append(place);
    });
    body.append(row);
  });
  element.append(title, top, body);
  box.append(element);
  return box;
}

function textCell(text) {
  return [make("span", keepNumbers(text))];
}

// Between two moments. On a narrow page a line ends after it.
const ARROW = "\u00a0→ ";

function path(values, most = 6) {
  const shown = values.length > most ? [values[0], ...values.slice(2 - most)] : values;
  const texts = shown.map((value) => mebibytes(value).replace(" MiB", ""));
  if (shown.length < values.length) texts.splice(1, 0, "…");
  return texts.join(ARROW);
}

function growthTable(caption, note, rows) {
  return table(
    caption,
    note,
    ["Call stack", "Growth", "MiB at each moment", "Blocks", "Process"],
    rows.map((row) => [
      [stackButton(row.stack), ...(row.grewLast && caption === "Warm-ups" ? [make("div", "grew in the last interval too", "minor")] : [])],
      signed(row.bytes.at(-1) - row.bytes[0]),
      path(row.bytes),
      `${row.blocks[0]} → ${row.blocks.at(-1)}`,
      textCell(row.where),
    ]),
  );
}

function showFindings() {
  const box = byId("findings");
  if (data.leaks.length) {
    const finding = make("div", undefined, "finding");
    finding.append(growthTable("Leaks", "Live bytes that never fell and still grow.", data.leaks));
    box.append(finding);
  }
  data.fragmentation.forEach((found) => {
    const finding = make("div", undefined, "finding");
    finding.append(make("h3", `Fragmentation: ${found.where}`));
    found.reasons.forEach((reason) => finding.append(make("p", `${reason} (MiB).`)));
    finding.append(make("p", `Reserved minus allocated: ${path(found.unused)} MiB.`));
    finding.append(make("p", `${mebibytes(found.cached)} are cached at the end: release_cached() gives them back.`));
    if (found.holders.length) {
      finding.append(
        table(
          "What holds the segments",
          "at the last moment.",
          ["Call stack", "Unused bytes held", "Segments", "Blocks", "Size of these"],
          found.holders.map(([stack, bytes, blocks, segments, held]) => [
            [stackButton(stack)],
            mebibytes(held),
            String(segments),
            String(blocks),
            mebibytes(bytes),
          ]),
        ),
      );
    }
    box.append(finding);
  });
  if (!box.children.length) box.append(make("p", "No leak and no fragmentation.", "finding none"));
}

function showTables() {
  const paused = data.processes.some((row) => row.paused.some(Boolean));
  byId("processes").append(
    table(
      "Memory of each process and device",
      "MiB, at each moment. Those that leak come first. Held: free bytes of segments that few live bytes keep.",
      ["Process", "Allocated", "Reserved", "Reserved − allocated", "Held at the end", ...(paused ? ["Paused at the end"] : [])],
      data.processes.map((row) => [
        textCell(row.where),
        path(row.allocated, 4),
        path(row.reserved, 4),
        path(row.unused, 4),
        path(row.held.slice(-1)),
        ...(paused ? [path(row.paused.slice(-1))] : []),
      ]),
    ),
  );
  const box = byId("tables");
  if (data.warmUps.length) box.append(growthTable("Warm-ups", "Grew once, or stopped growing: lazily made state, filled caches.", data.warmUps));
  if (data.grown.length) box.append(growthTable("Grown", "More at the second moment.", data.grown));
  if (data.drifts.length) {
    box.append(
      table(
        "Drift",
        "Blocks that rise in the timeline as memory below them grows.",
        ["Call stack", "Blocks", "Size of each", "MiB below the first", "Grew below it"],
        data.drifts.map((row) => [
          [stackButton(row.stack), make("div", row.where, "minor")],
          String(row.blocks),
          mebibytes(row.bytes),
          path(row.positions),
          row.below.slice(0, 3).map(([stack, bytes]) => {
            const line = make("div");
            line.append(signed(bytes) + " ", stackButton(stack));
            return line;
          }),
        ]),
      ),
    );
  }
  if (!box.children.length) byId("growth-title").hidden = true;
}
