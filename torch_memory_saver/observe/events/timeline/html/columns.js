
// What the pictures show at which column, and how sizes and times are written. Pure functions of the data. pictures.js and
// views.js follow, in the same scope.

const KINDS = ["resident", "paused", "backup", "other"];
const NS = 1;
const SECOND = 1e9 * NS;
const SIZES = ["bytes", "KiB", "MiB", "GiB", "TiB"];

// In the largest unit of which it has one, or in that of `scale` bytes.
function size(bytes, scale = bytes) {
  if (bytes === 0) return "0";
  const unit = Math.min(Math.floor(Math.log2(Math.abs(scale)) / 10), SIZES.length - 1);
  const number = bytes / 1024 ** unit;
  const digits = unit === 0 || Math.abs(number) >= 100 ? 0 : 1;
  return `${number.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${SIZES[unit]}`;
}

// The distance of the ticks of an axis that goes so many bytes up and down, and the scale of their texts: halves of the largest
// unit are exact with one digit, and smaller steps are whole numbers of the next unit.
function sizeTicks(up, down) {
  const step = 2 ** Math.round(Math.log2((up + down) / 4));
  const most = Math.max(up, down);
  const unit = 1024 ** Math.floor(Math.log2(most) / 10);
  return { step, textScale: 2 * step >= unit ? most : step };
}

function duration(ns) {
  for (const [unit, length] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
    if (ns >= length) return `${(ns / length).toLocaleString("en", { maximumSignificantDigits: 4 })} ${unit}`;
  }
  return `${Math.round(ns)} ns`;
}

const LONG = 600 * SECOND;

// A time since the begin, as exactly as ticks of this distance need; in a long picture with hours and minutes.
function clock(ns, step, length) {
  const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step / SECOND))));
  const seconds = ns / SECOND;
  if (length < LONG) return `${seconds.toFixed(digits)} s`;
  const whole = Math.floor(seconds);
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60].map((part) => String(part).padStart(2, "0"));
  return parts.join(":") + (digits ? (seconds - whole).toFixed(digits).slice(1) : "");
}

const MINUTES = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

// Times at which the axis has a tick, at most `most`.
function ticks(from, to, most) {
  const rough = (to - from) / most;
  let step = MINUTES.map((seconds) => seconds * SECOND).find((one) => one >= rough);
  if (rough < 30 * SECOND) {
    const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
    step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  }
  step = step || Math.ceil(rough / (86400 * SECOND)) * 86400 * SECOND;
  const result = [];
  for (let time = Math.ceil(from / step) * step; time <= to; time += step) result.push(time);
  return { step, times: result };
}

// ---- The data of a GPU

// Times become absolute, and rows typed arrays. `stacksOf` has the stacks of each band.
function unpack(gpu) {
  const times = new Float64Array(gpu.times.length);
  let now = 0;
  gpu.times.forEach((difference, row) => {
    now += difference;
    times[row] = now;
  });
  const stacksOf = gpu.bands.map(() => []);
  gpu.stacks.forEach((bands, stack) => bands.forEach((band) => stacksOf[band].push(stack)));
  const ordinals = new Map(gpu.ordinals);
  const places = new Map([...ordinals.keys()].map((process, place) => [process, place]));
  return { ...gpu, times, of: Int32Array.from(gpu.of), bytes: Float64Array.from(gpu.bytes), stacksOf, ordinals, places };
}

// For each column of the time from `from` to `to`: each stack at the moment in the column at which it is highest, as
// {totals, values: one array a band of the stack}. A level holds until the next change.
function columnsOf(gpu, from, to, count) {
  const { times, of, bytes, stacks, stacksOf } = gpu;
  const levels = new Float64Array(gpu.bands.length);
  const totals = new Float64Array(stacks.length);
  const touched = new Set();
  const result = stacks.map((bands) => ({ totals: new Float64Array(count), values: bands.map(() => new Float64Array(count)) }));
  const note = (stack, column) => {
    result[stack].totals[column] = totals[stack];
    stacks[stack].forEach((band, place) => (result[stack].values[place][column] = levels[band]));
  };
  let row = 0;
  const step = () => {
    const band = of[row];
    for (const stack of stacksOf[band]) {
      totals[stack] += bytes[row] - levels[band];
      touched.add(stack);
    }
    levels[band] = bytes[row];
    row++;
  };
  while (row < times.length && times[row] <= from) step();
  for (let column = 0; column < count; column++) {
    const end = from + ((to - from) * (column + 1)) / count;
    for (let stack = 0; stack < stacks.length; stack++) note(stack, column);
    // Changes at the very end of the picture belong to its last column.
    const inside = () => row < times.length && (times[row] < end || (column === count - 1 && times[row] === end));
    while (inside()) {
      touched.clear();
      const now = times[row];
      while (row < times.length && times[row] === now) step();
      for (const stack of touched) {
        if (totals[stack] > result[stack].totals[column]) note(stack, column);
      }
    }
  }
  return result;
}

function peakOf(values) {
  return values.reduce((most, value) => Math.max(most, value), 0);
}

// ---- Texts about tags and calls

const LONGEST_TAG = 60;
const MOST_TAGS = 8;

// A tag with its begin only if it is long. The marks around it keep the direction in which it is written inside.
function tagName(number) {
  const letters = [...data.tags[number]];
  const shown = letters.length > LONGEST_TAG ? [...letters.slice(0, LONGEST_TAG - 1), "…"] : letters;
  return `\u2068${shown.join("")}\u2069`;
}

function tagNames(numbers) {
  const names = numbers.slice(0, MOST_TAGS).map((number) => `"${tagName(number)}"`);
  if (numbers.length > MOST_TAGS) names.push(plural(numbers.length - MOST_TAGS, "other tag"));
  return names.join(", ");
}

function failureText(status, result) {
  return `failed: ${status}${result ? `, CUresult ${result}` : ""}`;
}

function callText(call, ordinal) {
  const tags = tagNames(call.tags);
  const lines = [`${call.what}${tags ? " of " + tags : ""}: ${duration(call.ns)}${call.unfinished ? " so far, not finished" : ""}`];
  const moved = call.what === "pause" ? "released" : "mapped";
  if (call.bytes) lines.push(`${size(call.bytes)} ${moved} in ${plural(call.allocations, "allocation")}`);
  if (call.copied) lines.push(`${size(call.copied)} copied ${call.what === "pause" ? "to" : "from"} backups`);
  if (call.unchanged) lines.push(`${size(call.unchanged)} unchanged since the last pause`);
  if (call.status) lines.push(failureText(call.status, call.result));
  for (const [name, device, , ns, busy, bytes, status] of call.phases) {
    if (device >= 0 && device !== ordinal) continue;
    const facts = [busy && busy !== ns ? `${duration(busy)} of ${duration(ns)}` : duration(ns)];
    if (bytes) facts.push(size(bytes));
    if (bytes && name === "copy" && ns) facts.push(`${size(bytes / (ns / SECOND))}/s`);
    if (status !== "OK") facts.push(status);
    lines.push(`\u2003${name}: ${facts.join(", ")}`);
  }
  return lines.join("\n");
}
