// A lesson's outputs stay hidden until the reader has predicted (site.css hides them if scripts
// run). The names come from the cell `predict(name=..., ...)`, the measurements from what the last
// cell, `compare()`, printed, and the ranges from conf.py.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const shown = cells().filter(output);
  const asking = shown.findIndex((cell) => code(cell).startsWith("predict("));
  if (asking < 0) return show(shown);
  show(shown.slice(0, asking));
  hideUntilPredicted(shown[asking], shown.slice(asking + 1));
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
  const { ranges } = lesson();
  const measured = Object.fromEntries(names.map((name) =>
    [name, output(last).textContent.match(`${spaced(name)} +measured (\\S+);`)[1]]));
  const form = predictionForm(names), fields = [...form.querySelectorAll("input")];
  output(asking).replaceWith(form);
  for (const cell of hidden) {
    const link = element("a", { href: "#prediction", textContent: "predicted" });
    output(cell).before(element("p", { className: "withheld" }, "Hidden until you have ", link, "."));
  }

  function reveal(predicted) {  // null: nothing was predicted
    document.documentElement.classList.add("predicted");
    show(hidden);
    document.querySelectorAll(".comparison").forEach((table) => table.remove());
    if (!predicted) return output(last).replaceChildren(...printed);
    const compared = (some) => comparison(some, predicted, measured, ranges);
    output(last).replaceChildren(compared(names));
    for (const cell of hidden.slice(0, -1)) {
      const here = names.filter((name) => measures(code(cell), name));
      if (here.length) output(cell).append(compared(here));
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
    keep("predictions", predicted);
  });
  form.querySelector(".skip").addEventListener("click", () => reveal(null));
  form.querySelector(".again").addEventListener("click", () => {
    keep("predictions", {});
    document.documentElement.classList.remove("predicted");
    hidden.forEach((cell) => output(cell).classList.remove("shown"));
    fields[0].focus();
  });

  const earlier = kept("predictions");
  if (Object.keys(earlier).length) {
    for (const field of fields) field.value = earlier[field.name] ?? "";
    reveal(earlier);
  }
}

function predictionForm(names) {
  const form = element("form", { className: "prediction", id: "prediction" });
  form.append(element("p", { textContent: "Predict first. The outputs below are hidden until then." }));
  for (const name of names) {
    form.append(element("label", { textContent: spaced(name) },
                        element("input", { name, inputMode: "decimal", autocomplete: "off" }),
                        element("span", { className: "fault", role: "alert" })));
  }
  form.append(button("go", "Show the outputs", "submit"),
              button("skip", "Show them without predicting"),
              button("again", "Hide them and predict again"));
  return form;
}

// As in form.py, a choice of a whole number has no ratio.
function comparison(names, predicted, measured, ranges) {
  const table = element("table", { className: "comparison" });
  const row = (kind, texts) => table.insertRow().append(
    ...texts.map((textContent) => element(kind, { textContent })));
  row("th", ["", "you said", "measured", "ratio"]);
  for (const name of names) {
    const ratio = number(predicted[name] ?? "") / Number(measured[name]);
    const has = Number.isFinite(ratio) && !ranges[name]?.choice;
    row("td", [spaced(name), predicted[name] ?? "–", measured[name], has ? ratio.toFixed(2) : "–"]);
  }
  return table;
}

function fault(text, { low, high, choice }) {
  const value = number(text);
  if (!Number.isFinite(value)) return "write a number, as 0.5, 50%, 10 or 10x";
  if (value < low || value > high) return `not between ${low} and ${high}`;
  return choice && !Number.isInteger(value) ? "not a whole number" : "";
}

// Whether a cell's code calls measured(name=…), or measured(**{f"na{…}": …}).
function measures(code, name) {
  const call = code.match(/\bmeasured\([^]*/)?.[0] ?? "";
  return new RegExp(`\\b${name}=`).test(call)
    || [...call.matchAll(/f"(\w+)\{/g)].some((match) => name.startsWith(match[1]));
}

function show(shown) { shown.forEach((cell) => output(cell).classList.add("shown")); }
