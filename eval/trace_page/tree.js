const STATES = {
  a: ["✓", "accepted"], r: ["✗", "rejected"], n: ["…", "not judged"], t: ["–", "not taken"], o: ["◆", "put by the target"],
};
const CUT_TEXT = 14;

/* The tree of a step as nodes: the drafts, then the target's own token if it was not cut. */
function treeOf(step) {
  const nodes = (step.ids || []).map((id, i) => ({
    id, node: i + 1, parent: step.parents[i], state: step.state[i], q: step.q[i], p: step.p[i], children: [],
  }));
  const root = { id: step.root, node: 0, state: "root", children: [] };
  const all = [root, ...nodes];
  for (const node of nodes) all[node.parent].children.push(node);
  const accepted = step.accepted || [];
  if (step.out && step.out.length > accepted.length) {
    const last = accepted.length ? accepted[accepted.length - 1] : 0;
    const own = { id: step.out.at(-1), state: "o", q: null, p: step.out_p.at(-1), parent: last, children: [] };
    all[last].children.push(own);
  }
  return root;
}

function isChain(step) {
  return (step.parents || []).every((parent, i) => parent === i);
}

function nodeRow(run, node, where = "") {
  const [sign, what] = STATES[node.state];
  const part = (name, value) => (value === null || value === undefined ? null : el("span", { class: "p" }, `${name} ${shown(value)}`));
  return el("span", { class: `node ${node.state}` }, `${sign} `,
    el("span", { class: "text", title: `token ${node.id}` }, marked(textOf(run, node.id))),
    el("span", { class: "what" }, `${what}${where}`), part("draft", node.q), " ", part("target", node.p));
}

/* A chain is one list, deep as it may be; a tree is nested. */
function treeList(run, step) {
  const root = treeOf(step);
  if (isChain(step)) {
    const list = el("ol", { class: "tree" });
    let own = null;
    for (let node = root; node; node = node.children.find((child) => child.state !== "o")) {
      own = node.children.find((child) => child.state === "o") || own;
      if (node !== root) list.append(el("li", {}, nodeRow(run, node)));
    }
    const place = (step.accepted || []).length + 1;
    const after = own && el("p", {}, nodeRow(run, own, ` at place ${place}`));
    return el("div", {}, step.ids ? list : null, after);
  }
  const nested = (node) => el("ul", {}, node.children.map((child) =>
    el("li", {}, nodeRow(run, child), child.children.length ? nested(child) : null)));
  const list = nested(root);
  list.className = "tree";
  return el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Draft as a tree" }, list);
}

/* A drawing of a tree for wide screens; the list beside it says all of it. */
function treeDrawing(run, step) {
  const [wide, high, across, down] = [128, 24, 158, 32];
  const edges = [], boxes = [];
  let leaves = 0, deepest = 0;
  const place = (node, depth) => {
    deepest = Math.max(deepest, depth);
    const ys = node.children.map((child) => place(child, depth + 1));
    const y = ys.length ? (ys[0] + ys.at(-1)) / 2 : leaves++ * down;
    const x = depth * across;
    node.children.forEach((child, i) => edges.push(drawn("path", {
      class: `edge ${child.state}`,
      d: `M${x + wide} ${y + high / 2} C${x + wide + 15} ${y + high / 2} ${x + across - 15} ${ys[i] + high / 2} ${x + across} ${ys[i] + high / 2}`,
    })));
    const characters = [...marked(textOf(run, node.id))];
    const text = characters.length > CUT_TEXT - 5 ? `${characters.slice(0, CUT_TEXT - 6).join("")}…` : characters.join("");
    const p = node.p === null || node.p === undefined ? "" : ` ${shown(node.p)}`;
    boxes.push(drawn("g", { transform: `translate(${x} ${y})` },
      drawn("rect", { class: `box ${node.state}`, width: wide, height: high, rx: 4 }),
      drawn("text", { x: 5, y: 16, class: node.state }, `${node.state in STATES ? STATES[node.state][0] : "●"} ${text}${p}`)));
    return y;
  };
  place(treeOf(step), 0);
  const [width, height] = [(deepest + 1) * across, Math.max(1, leaves) * down];
  const picture = drawn("svg", { width, height, viewBox: `-2 -2 ${width} ${height + 4}`, "aria-hidden": "true" }, edges, boxes);
  return el("div", { class: "drawing scroll", tabindex: 0, role: "group", "aria-label": "Drawing of the draft; the list after it says the same" }, picture);
}
