/* What a step did, in words. */
function stepSays(run, step) {
  if (!step.out) return `Ran ${counted(step.rows, "row")} of the prompt or of what was computed before; no token was chosen.`;
  const drafted = (step.ids || []).length, accepted = (step.accepted || []).length;
  const own = step.out.length > accepted ? step.out.at(-1) : null;
  const p = step.out_p.at(-1);
  const put = own === null ? "" : `${quoted(run, own)}${p === null ? "" : ` (probability ${shown(p)})`}`;
  if (!drafted) return `Nothing was drafted; the target put ${put}.`;
  const begin = `${counted(drafted, "token")} drafted, ${accepted} accepted`;
  if (own === null) return `${begin}; the target's own token was cut ${ending(step)}.`;
  const last = accepted ? step.accepted[accepted - 1] : 0;
  const refused = step.ids.map((id, i) => [id, i]).filter(([, i]) => step.parents[i] === last && step.state[i] !== "n");
  if (!refused.length) return `${begin}; behind the last of them the target put ${put}.`;
  const instead = refused.map(([id, i]) => `${quoted(run, id)}${step.p[i] === null ? "" : ` (${shown(step.p[i])})`}`);
  return `${begin}; then the target put ${put} instead of ${instead.join(", ")}.`;
}

const ENDS = { stop: "by a stop (EOS or a stop criterion)", length: "by the limit of length" };
const ending = (step) => ENDS[step.end] || (step.end ? `by ${step.end}` : "by a stop");

/* How each emitted token was chosen. */
function emittedList(run, step) {
  const accepted = (step.accepted || []).length;
  return el("ol", {}, step.out.map((id, i) => {
    const drafted = i < accepted;
    const p = step.out_p[i] === null ? "" : `, target probability ${shown(step.out_p[i])}`;
    const top = step.top[i] === undefined ? "" : step.top[i] === id
      ? `; largest logit, ${shown(step.top_gap[i])} ahead of the second`
      : `; the largest logit was ${quoted(run, step.top[i])}, ${shown(step.top_gap[i])} ahead of the second`;
    return el("li", {}, ...tokenNodes(run, id, drafted ? "drafted" : "own", false),
      ` ${drafted ? "accepted draft" : "the target's own"}${p}${top}`);
  }));
}

function stepBody(run, request, step) {
  const [draft, verify, other] = step.t;
  const shared = step.batch > 1 ? `, shared by ${step.batch} requests` : "";
  const parts = [el("p", {}, `${step.prefill ? "Prefill" : "Decode"} step: draft ${milliseconds(draft)}, verify ${milliseconds(verify)}, other ${milliseconds(other)}${shared}.`)];
  if (step.at !== undefined && step.at !== null) parts.push(el("p", { class: "muted" }, `Emitted ${shown(step.at)} s after the request came.`));
  if (step.end) parts.push(el("p", {}, `The answer ended here ${ending(step)}.`));
  if (!step.out) return parts;
  if (step.ids) {
    const chain = isChain(step);
    parts.push(el("h3", {}, chain ? "Draft: a chain" : "Draft: a tree"),
      el("p", { class: "muted" }, "behind ", el("span", { class: "token" }, marked(textOf(run, step.root))), ` at position ${step.position}. `,
        step.q.every((q) => q === null) ? "The drafts were chosen, not drawn: they have no draft probability." : null));
    if (!chain) parts.push(treeDrawing(run, step));
    parts.push(treeList(run, step));
  }
  parts.push(el("h3", {}, `Emitted: ${counted(step.out.length, "token")}`), emittedList(run, step));
  return parts;
}
