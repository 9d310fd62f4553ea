const DATA = JSON.parse(byId("data").textContent);
const now = { run: null, request: null, index: -1, links: [] };

function nameOf(run, request, step) {
  const first = DATA.runs.length > 1 ? `run-${run.number}-` : "";
  return `#${first}request-${request.id}${step ? `-step-${step.n}` : ""}`;
}

/* The place that a fragment names, as far as it exists. */
function placeOf(fragment) {
  const found = /^#(?:run-(\d+)-)?request-(\d+)(?:-step-(\d+))?$/.exec(fragment);
  if (!found) return null;
  const has = (run) => run.requests.some((request) => request.id === Number(found[2]));
  const run = found[1] ? DATA.runs.find((r) => r.number === Number(found[1])) : [now.run, ...DATA.runs].find((r) => r && has(r));
  const request = run && run.requests.find((r) => r.id === Number(found[2]));
  if (!request) return null;
  const index = found[3] ? request.steps.findIndex((step) => step.n === Number(found[3])) : 0;
  return { run, request, index: Math.max(0, index) };
}

function chooser(id, label, options, chosen, choose) {
  if (options.length < 2) return byId(id).replaceChildren();
  const select = el("select", {}, options.map(([value, text]) => el("option", { value }, seen(text))));
  select.value = String(chosen);
  select.addEventListener("change", () => choose(select.value));
  return byId(id).replaceChildren(el("label", {}, `${label} `, select));
}

function ruleOf(request) {
  const rule = request.rule === null ? "unknown" : request.rule;
  if (request.lossless === false) return el("span", {}, `${seen(rule)} `, el("span", { class: "lossy" }, "LOSSY"));
  return el("span", {}, request.lossless === null ? `${seen(rule)} (whether lossless is not known)` : seen(rule));
}

function showRun(run) {
  const header = run.header, base = (path) => (typeof path === "string" ? path.split("/").filter(Boolean).at(-1) : null);
  const rates = ["acceptance_rate", "acceptance_length", "num_emitted_tokens"].map((name) => figure(name, run[name]));
  byId("run-figures").replaceChildren(figure("model", base(header.model) || header.model_class), figure("drafter", header.drafter),
    figure("verifier", verifiersOf(run)), figure("dtype, device", [header.dtype, header.device].filter(Boolean).join(", ")),
    figure("requests", run.requests.length), figure("steps", run.num_steps), ...rates, figure("wall time of its steps", `${shown(run.wall.total_s)} s`));
  const flat = Object.entries(header).flatMap(([name, value]) => (value && typeof value === "object" && !Array.isArray(value)
    ? Object.entries(value).map(([inner, v]) => [`${name}.${inner}`, v]) : [[name, value]]));
  byId("run-settings").replaceChildren(...flat.map(([name, value]) => figure(seen(name), value)));
  const lost = byId("run-unreadable");
  lost.hidden = !run.num_unreadable;
  lost.textContent = `Left out of this run: ${run.num_unreadable} of what its steps say of requests; fields are missing or contradict each other.`;
  chooser("run-chooser", "Run of this file", DATA.runs.map((r) => [r.number, `${r.number}: ${shown(r.header.drafter)}, ${counted(r.num_steps, "step")}, ${shown(r.header.time)}`]),
    run.number, (value) => go({ run: DATA.runs.find((r) => r.number === Number(value)) }));
  chooser("request-chooser", "Request of this run", run.requests.map((r) => [r.id, `${r.id}: ${counted(r.num_new_tokens, "token")}, acceptance_length ${shown(r.figures.acceptance_length)}`]),
    now.request && now.request.id, (value) => go({ run, request: run.requests.find((r) => r.id === Number(value)) }));
}

function verifiersOf(run) {
  const rules = new Map(run.requests.map((request) => [`${request.rule} ${request.lossless}`, request]));
  return el("span", {}, [...rules.values()].flatMap((request, i) => [i ? ", " : null, ruleOf(request)]));
}

function howSampled(sampling) {
  if (!sampling) return null;
  const { seed, seed_given: given, processors, ...values } = sampling;
  const how = sampling.temperature === 0 ? ["greedy"] : Object.entries(values).map(([name, value]) => `${name} ${shown(value)}`);
  if (sampling.temperature !== 0) how.push(`seed ${seed}${given === false ? " (drawn)" : ""}`);
  return how.concat((processors || []).length ? [`processors ${shown(processors)}`] : []).join(", ");
}

function showRequest(run, request) {
  byId("request-title").textContent = `Request ${request.id}`;
  byId("request-figures").replaceChildren(figure("verifier", ruleOf(request)), figure("sampling", howSampled(request.sampling)),
    ...Object.entries(request.figures).map(([name, value]) => figure(name, value)), figure("finish_reason", request.finish_reason));
  const ids = request.prompt_token_ids;
  byId("prompt-title").textContent = request.figures.num_prompt_tokens ? `Prompt (${counted(request.figures.num_prompt_tokens, "token")})` : "Prompt";
  byId("prompt-text").textContent = request.prompt_text !== null ? seen(request.prompt_text)
    : ids ? ids.join(" ") : "The trace does not say it: it was written by an earlier release, or its first step was lost.";
  showAnswer(run, request);
  byId("times-body").replaceChildren(...timesOf(request, (step) => go({ run, request, index: request.steps.indexOf(step) }),
    (step, text) => el("a", { href: nameOf(run, request, step) }, text)).filter(Boolean));
}

function showAnswer(run, request) {
  now.links = request.steps.map((step, index) => {
    const words = (step.out || []).map((id) => textOf(run, id)).join("");
    const accepted = (step.accepted || []).length;
    const label = step.out ? `Step ${step.n}: ${seen(words)}, ${accepted} of ${(step.ids || []).length} drafts accepted` : `Step ${step.n}: prefill`;
    const link = el("a", { href: nameOf(run, request, step), tabindex: -1, "data-index": index, "aria-label": label });
    if (!step.out) link.append(el("span", { class: "chip" }, `prefill ${step.rows}`));
    (step.out || []).forEach((id, i) => link.append(...tokenNodes(run, id, i < accepted ? "drafted" : "own", true)));
    return link;
  });
  const gaps = (link, i) => (request.steps[i].gap ? [el("span", { class: "chip" }, `${counted(request.steps[i].gap, "token")} missing`), link] : [link]);
  const all = document.createDocumentFragment();
  now.links.flatMap(gaps).forEach((node) => all.append(node));
  byId("tokens").replaceChildren(all);
}

function showStep(run, request, index) {
  const step = request.steps[index];
  byId("step-title").textContent = `Step ${step.n}`;
  byId("step-says").textContent = stepSays(run, step);
  byId("step-body").replaceChildren(...stepBody(run, request, step).filter(Boolean));
  byId("previous").disabled = index === 0;
  byId("next").disabled = index === request.steps.length - 1;
  for (const link of byId("tokens").querySelectorAll("[aria-current]")) {
    link.removeAttribute("aria-current");
    link.tabIndex = -1;
  }
  const link = now.links[index], box = byId("tokens");
  link.setAttribute("aria-current", "step");
  link.tabIndex = 0;
  const [at, frame] = [link.getBoundingClientRect(), box.getBoundingClientRect()];
  if (at.top < frame.top || at.bottom > frame.bottom) box.scrollTop += at.top - frame.top - frame.height / 3;
}

/* Show a place; only what changed is built anew. */
function go({ run, request, index }) {
  const wanted = request || run.requests[0];
  const isNew = now.request !== wanted;
  const isNewRun = now.run !== run;
  now.run = run;
  now.request = wanted;
  now.index = index || 0;
  if (isNewRun) showRun(run);
  else if (isNew && run.requests.length > 1) byId("request-chooser").querySelector("select").value = String(wanted.id);
  if (isNew) showRequest(run, wanted);
  showStep(run, wanted, now.index);
  const fragment = nameOf(run, wanted, wanted.steps[now.index]);
  if (location.hash !== fragment) history.replaceState(null, "", fragment);
}

function turn(by, focus) {
  const index = Math.min(now.request.steps.length - 1, Math.max(0, now.index + by));
  go({ run: now.run, request: now.request, index });
  if (focus) now.links[index].focus({ preventScroll: true });
}

const KEYS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

document.addEventListener("keydown", (event) => {
  if (!(event.key in KEYS) || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
  const inside = byId("tokens").contains(event.target);
  const free = event.target === document.body || event.target === byId("step"); // a click into a step gives it the focus
  if (!inside && (!free || !event.key.startsWith("Arrow"))) return;
  event.preventDefault();
  turn(KEYS[event.key], inside);
});
byId("tokens").addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go({ run: now.run, request: now.request, index: Number(link.dataset.index) });
  now.links[now.index].focus({ preventScroll: true });
});
byId("previous").addEventListener("click", () => turn(-1, false));
byId("next").addEventListener("click", () => turn(1, false));
window.addEventListener("hashchange", () => {
  const place = placeOf(location.hash);
  if (place) go(place);
});

byId("page").hidden = false;
go(placeOf(location.hash) || { run: DATA.runs[0] });
