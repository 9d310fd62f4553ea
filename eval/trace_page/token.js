/* Characters that cannot be seen get marks: as in visible.py. */
const MARKS = { "\n": "⏎", "\r": "␍", "\t": "⇥", " ": "·" };
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\p{Zs}]/u;

function mark(character) {
  if (character in MARKS) return MARKS[character];
  const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  return UNSEEN.test(character) ? `⟨U+${code}⟩` : null;
}

const marked = (text) => [...text].map((character) => mark(character) || character).join("");
const seen = (text) => [...text].map((c) => (c === " " || c === "\n" || c === "\t" ? c : mark(c) || c)).join("");

function textOf(run, id) {
  const text = Object.hasOwn(run.texts, id) ? run.texts[id] : null;
  return text === null ? `#${id}` : text === "" ? "⟨empty⟩" : text;
}

const quoted = (run, id) => `“${marked(textOf(run, id))}”`;

/* A token as nodes; in the answer a line ends where the token has a line break. */
function tokenNodes(run, id, kind, breaks) {
  const span = el("span", { class: `token ${kind}`, title: `token ${id}` });
  const characters = [...textOf(run, id)];
  characters.forEach((character, i) => {
    const sign = mark(character);
    if (character === " " && i) span.append(el("wbr"));
    span.append(sign === null ? character : el("span", { class: "mark" }, sign));
    if (character === "\n" && breaks && i < characters.length - 1) span.append(el("br"));
  });
  const before = characters[0] === " " ? [el("wbr")] : []; // or a line would end with an empty box
  return [...before, span, ...(breaks && characters.at(-1) === "\n" ? [el("br")] : [])];
}
