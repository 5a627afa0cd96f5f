// What the scripts of a lesson's page share. The page has a JSON element, which conf.py writes from
// the lesson's solutions: ranges of predictions, the quiz, and the tasks that need no torch.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  for (const picture of document.querySelectorAll(".cell_output > img")) { // scrolls alone
    const box = element("div");
    picture.replaceWith(box);
    box.append(picture);
  }
});

function lesson() { return JSON.parse(document.getElementById("lesson").textContent); }

// What the browser keeps of this page under a name: an object, {} if there is nothing.
function kept(name) { return JSON.parse(localStorage.getItem(`${name} of ${location.pathname}`) ?? "{}"); }

function keep(name, value) {
  localStorage.setItem(`${name} of ${location.pathname}`, JSON.stringify(value));
}

function cells() { return [...document.querySelectorAll("div.cell")]; }

function input(cell) { return cell.querySelector(".cell_input"); }

function output(cell) { return cell.querySelector(".cell_output"); }

function code(cell) { return input(cell)?.textContent.trim() ?? ""; }

// A number as form.py reads it: 0.5, 50%, 10 or 10x.
function number(text) {
  const bare = text.trim().replace(/[%x×]$/, "").trim();
  return bare === "" ? NaN : Number(bare) / (text.trim().endsWith("%") ? 100 : 1);
}

function spaced(name) { return name.replaceAll("_", " "); }

function element(kind, properties, ...children) {
  const made = Object.assign(document.createElement(kind), properties);
  made.append(...children);
  return made;
}

function button(className, textContent, type = "button") {
  return element("button", { className, textContent, type });
}
