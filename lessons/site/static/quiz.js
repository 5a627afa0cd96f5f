// The quiz of a lesson's page is a form, in the place of what `quiz(..., ...)` printed. The browser
// keeps the answers.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const cell = cells().find((cell) => /^quiz\(/m.test(code(cell)));
  if (!cell) return;
  const { quiz, rounding } = lesson();
  const form = element("form", { className: "quiz" }), answers = kept("answers");
  form.append(...quiz.map((question, i) => questionField(question, `question${i}`)),
              button("go", "Check my answers", "submit"), button("again", "Start again"),
              element("p", { className: "open", role: "status" }));
  input(cell).remove();
  output(cell).replaceChildren(form);
  const answer = (i) => form.elements[`question${i}`].value.trim();
  const verdicts = [...form.querySelectorAll(".verdict")];

  function judgeAll() {
    quiz.forEach((question, i) => {
      const verdict = answer(i) ? judge(question, answer(i), rounding) : "";
      verdicts[i].textContent = verdict;
      verdicts[i].classList.toggle("right", verdict.startsWith("right"));
    });
    const missing = quiz.map((_, i) => i + 1).filter((n) => !answer(n - 1));
    form.querySelector(".open").textContent =
      missing.length ? `not answered yet: ${missing.join(", ")}` : "";
  }

  form.addEventListener("input", ({ target }) => {  // a verdict is of the answer next to it
    target.closest("fieldset").querySelector(".verdict").textContent = "";
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    judgeAll();
    keep("answers", quiz.map((_, i) => answer(i)));
  });
  form.querySelector(".again").addEventListener("click", () => {
    keep("answers", {});
    form.reset();
    for (const text of [...verdicts, form.querySelector(".open")]) text.textContent = "";
  });

  if (answers.length) {
    answers.forEach((given, i) => { form.elements[`question${i}`].value = given; });
    judgeAll();
  }
});

function questionField({ text, answer, options }, name) {
  const field = element("fieldset", {}, element("legend", {}, ...marked(text)));
  const choices = options.map((option, i) => ["abcdef"[i], `${"abcdef"[i]}) ${option}`]);
  if (typeof answer === "boolean") choices.push(["yes", "yes"], ["no", "no"]);
  for (const [value, label] of choices) {
    field.append(element("label", {}, element("input", { type: "radio", name, value }),
                         element("span", {}, ...marked(label))));
  }
  if (!choices.length) {
    field.append(element("label", {}, "a number ", element("input", {
      name, inputMode: "decimal", autocomplete: "off" })));
  }
  field.append(element("p", { className: "verdict", role: "status" }));
  return field;
}

// As form.py judges.
function judge({ answer, because }, given, rounding) {
  let right = given === answer;
  if (typeof answer === "boolean") right = (given === "yes") === answer;
  if (typeof answer === "number") {
    if (!Number.isFinite(number(given))) return `${given} is not an answer here; write a number, such as 0.5`;
    right = Math.abs(number(given) - answer) < rounding;
  }
  return `${right ? "right" : "wrong"}: ${because}`;
}

// A text with `code`, as nodes.
function marked(text) {
  return text.split("`").map((part, i) => i % 2 ? element("code", { textContent: part }) : part);
}
