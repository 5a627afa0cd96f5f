// A lesson's outputs stay hidden until the reader has predicted (site.css hides them if scripts
// run). The names come from the cell `predict(name=..., ...)`, the measurements from what the last
// cell, `compare()`, printed, and the ranges from conf.py.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const cells = [...document.querySelectorAll("div.cell")].filter(output);
  const asking = cells.findIndex((cell) => code(cell).startsWith("predict("));
  if (asking < 0) return show(cells);
  show(cells.slice(0, asking));
  hideUntilPredicted(cells[asking], cells.slice(asking + 1));
  // a run of the gallery can be stepped through below the link to it
  for (const link of document.querySelectorAll("p a[href^='gallery/']")) {
    link.closest("p").after(element("iframe", {
      className: "run", loading: "lazy", src: link.href, title: "a run, pass by pass",
    }));
  }
});

function hideUntilPredicted(asking, hidden) {
  const last = hidden.at(-1), printed = [...output(last).childNodes];
  const names = [...code(asking).matchAll(/(\w+)=/g)].map((match) => match[1]);
  const ranges = JSON.parse(document.getElementById("ranges").textContent);
  const measured = Object.fromEntries(names.map((name) =>
    [name, output(last).textContent.match(`${spaced(name)} +measured (\\S+);`)[1]]));
  const store = `predictions of ${location.pathname}`;
  const form = formFor(names), fields = [...form.querySelectorAll("input")];
  output(asking).replaceWith(form);
  for (const cell of hidden) {
    const note = element("p", { className: "withheld", textContent: "Hidden until you have " });
    note.append(element("a", { href: "#prediction", textContent: "predicted" }), ".");
    output(cell).before(note);
  }

  function reveal(predicted) {  // null: nothing was predicted
    document.documentElement.classList.add("predicted");
    show(hidden);
    document.querySelectorAll(".comparison").forEach((table) => table.remove());
    if (!predicted) return output(last).replaceChildren(...printed);
    output(last).replaceChildren(comparison(names, predicted, measured));
    for (const cell of hidden.slice(0, -1)) {
      const here = names.filter((name) => measures(code(cell), name));
      if (here.length) output(cell).append(comparison(here, predicted, measured));
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    for (const field of fields) {
      field.nextSibling.textContent = fault(field.value, ranges[field.name]);
    }
    const wrong = fields.find((field) => field.nextSibling.textContent);
    if (wrong) return wrong.focus();
    const predicted = Object.fromEntries(fields.map((field) => [field.name, field.value.trim()]));
    reveal(predicted);
    localStorage.setItem(store, JSON.stringify(predicted));
  });
  form.querySelector(".skip").addEventListener("click", () => reveal(null));
  form.querySelector(".again").addEventListener("click", () => {
    localStorage.removeItem(store);
    document.documentElement.classList.remove("predicted");
    hidden.forEach((cell) => output(cell).classList.remove("shown"));
    fields[0].focus();
  });

  const kept = JSON.parse(localStorage.getItem(store));
  if (kept) {
    for (const field of fields) field.value = kept[field.name] ?? "";
    reveal(kept);
  }
}

function formFor(names) {
  const form = element("form", { className: "prediction", id: "prediction" });
  form.append(element("p", { textContent: "Predict first. The outputs below are hidden until then." }));
  for (const name of names) {
    const label = element("label", { textContent: spaced(name) });
    label.append(element("input", { name, inputMode: "decimal", autocomplete: "off" }),
                 element("span", { className: "fault", role: "alert" }));
    form.append(label);
  }
  const button = (className, textContent, type) => element("button", { className, textContent, type });
  form.append(button("reveal", "Show the outputs", "submit"),
              button("skip", "Show them without predicting", "button"),
              button("again", "Hide them and predict again", "button"));
  return form;
}

function comparison(names, predicted, measured) {
  const table = element("table", { className: "comparison" });
  const row = (kind, texts) => table.insertRow().append(
    ...texts.map((textContent) => element(kind, { textContent })));
  row("th", ["", "you said", "measured", "ratio"]);
  for (const name of names) {
    const ratio = number(predicted[name] ?? "") / Number(measured[name]);
    const rounded = Number.isFinite(ratio) ? ratio.toFixed(2) : "–";
    row("td", [spaced(name), predicted[name] ?? "–", measured[name], rounded]);
  }
  return table;
}

// A prediction as form.py reads it: 0.5, 50%, 10 or 10x.
function number(text) {
  const bare = text.trim().replace(/[%x×]$/, "").trim();
  return bare === "" ? NaN : Number(bare) / (text.trim().endsWith("%") ? 100 : 1);
}

function fault(text, [low, high]) {
  const value = number(text);
  if (!Number.isFinite(value)) return "write a number, as 0.5, 50%, 10 or 10x";
  return value < low || value > high ? `not between ${low} and ${high}` : "";
}

// Whether a cell's code calls measured(name=…), or measured(**{f"na{…}": …}).
function measures(code, name) {
  const call = code.match(/\bmeasured\([^]*/)?.[0] ?? "";
  return new RegExp(`\\b${name}=`).test(call)
    || [...call.matchAll(/f"(\w+)\{/g)].some((match) => name.startsWith(match[1]));
}

function code(cell) { return cell.querySelector(".cell_input").textContent.trim(); }

function output(cell) { return cell.querySelector(".cell_output"); }

function show(cells) { cells.forEach((cell) => output(cell).classList.add("shown")); }

function spaced(name) { return name.replaceAll("_", " "); }

function element(kind, properties) {
  return Object.assign(document.createElement(kind), properties);
}
