const PARTS = ["draft", "verify", "other"];
const MOST_COLUMNS = 500;

const totalOf = (step) => step.t[0] + step.t[1] + step.t[2];

/* Columns of one or several steps each: mean times, and the slowest step, which a click opens. */
function columnsOf(steps) {
  const size = Math.ceil(steps.length / MOST_COLUMNS), columns = [];
  for (let i = 0; i < steps.length; i += size) {
    const part = steps.slice(i, i + size);
    const slowest = part.reduce((a, b) => (totalOf(b) > totalOf(a) ? b : a));
    const t = PARTS.map((_, k) => part.reduce((sum, step) => sum + step.t[k], 0) / part.length);
    columns.push({ t, slowest, prefill: part.every((step) => step.prefill) });
  }
  return [columns, size];
}

function timesChart(steps, open) {
  const [columns, size] = columnsOf(steps);
  const height = (column) => column.t[0] + column.t[1] + column.t[2];
  const decode = columns.filter((column) => !column.prefill);
  const top = Math.max(...(decode.length ? decode : columns).map(height)) * 1.05 || 1;
  const paths = { draft: "", verify: "", other: "", prefill: "", cut: "" };
  columns.forEach((column, x) => {
    let y = 100;
    const bar = (part, seconds) => {
      const h = Math.min(y, (100 * seconds) / top);
      y -= h;
      paths[part] += `M${x} ${y}h0.9v${h}h-0.9z`;
    };
    if (column.prefill) bar("prefill", height(column));
    else PARTS.forEach((part, k) => bar(part, column.t[k]));
    if (height(column) > top) paths.cut += `M${x} 6L${x + 0.45} 0L${x + 0.9} 6z`;
  });
  const chart = drawn("svg", { class: "chart", viewBox: `0 0 ${columns.length} 100`, preserveAspectRatio: "none", "aria-hidden": "true" },
    Object.entries(paths).map(([part, d]) => drawn("path", { class: part, d })));
  chart.addEventListener("click", (event) => {
    const box = chart.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * columns.length);
    open(columns[Math.min(columns.length - 1, Math.max(0, x))].slowest);
  });
  const what = size > 1 ? `Each column is the mean of ${size} steps.` : "One column per step.";
  return [chart, el("p", { class: "muted" }, `${what} The chart is ${milliseconds(top)} high; a column with a tip is cut there. A click opens the step.`)];
}

/* Where the time went: shares, the chart, and the slowest steps as links. */
function timesOf(request, open, link) {
  const sums = { prefill: 0, draft: 0, verify: 0, other: 0 };
  for (const step of request.steps) {
    if (step.prefill) sums.prefill += totalOf(step);
    else PARTS.forEach((part, k) => { sums[part] += step.t[k]; });
  }
  const all = Object.values(sums).reduce((a, b) => a + b, 0) || 1;
  const split = el("div", { class: "split", "aria-hidden": "true" });
  for (const [part, seconds] of Object.entries(sums)) {
    const span = el("span", { class: part });
    span.style.flexGrow = String(seconds / all);
    split.append(span);
  }
  const words = Object.entries(sums).map(([part, seconds]) => el("span", {},
    el("span", { class: `swatch ${part}` }), `${part} ${shown(seconds)} s (${Math.round((100 * seconds) / all)} %)`));
  const slowest = request.steps.filter((step) => !step.prefill).sort((a, b) => totalOf(b) - totalOf(a)).slice(0, 5);
  const links = slowest.map((step, i) => [i ? ", " : "", link(step, `step ${step.n}`), ` ${milliseconds(totalOf(step))}`]);
  return [el("p", {}, words), split, ...timesChart(request.steps, open),
    slowest.length ? el("p", {}, "Slowest decode steps: ", links.flat()) : null,
    el("p", { class: "muted" }, "Times are those of whole steps, shared with the other requests of the batch. Prefill steps are not split.")];
}
