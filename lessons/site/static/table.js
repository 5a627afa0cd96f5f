// In a long table, a click on a column's head sorts the rows by it, and the next one reverses them.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table")) {
    if (table.tHead && table.rows.length > 20) sortable(table);
  }
});

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const text = (row) => row.cells[column].textContent.trim();
    const sort = () => {
      const falling = head.ariaSort === "ascending";
      const compare = (a, b) => {
        const [x, y] = [text(a), text(b)];
        if (!x || !y) return !x - !y; // empty cells are last
        return x.localeCompare(y, "en", { numeric: true }) * (falling ? -1 : 1);
      };
      body.append(...[...body.rows].sort(compare));
      for (const other of heads) other.ariaSort = null;
      head.ariaSort = falling ? "descending" : "ascending";
    };
    const go = button("sort", head.textContent);
    go.addEventListener("click", sort);
    head.replaceChildren(go);
  });
}
