"use strict";
const SVG = "http://www.w3.org/2000/svg";

/* Make an element; text is only ever set as text. */
function el(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function drawn(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const byId = (id) => document.getElementById(id);

function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return typeof value === "object" ? JSON.stringify(value) : String(value);
  if (Number.isInteger(value)) return String(value);
  return Math.abs(value) < 0.001 ? value.toExponential(1) : Number(value.toPrecision(3)).toString();
}

const milliseconds = (seconds) => `${shown(seconds * 1000)} ms`;
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

function figure(name, value) {
  const content = value instanceof Node ? value : seen(shown(value));
  return el("div", { class: content.length > 20 ? "long" : null }, el("dt", {}, name), el("dd", {}, content));
}
