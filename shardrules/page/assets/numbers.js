// Numbers as tables and messages have them: `bytes_text` and `count_text` in Python give the same texts.

"use strict";

/** With commas and 0 or 1 digits after the point; of two numbers that are as near, the even one. */
function rounded(n, digits) {
  const size = Math.abs(n);
  const low = Math.floor(size);
  // `toFixed` rounds as Python does, but for halves: 0.5 with no digits, and 0.25 with one.
  const even = digits ? (size - low === 0.25 ? low + 0.2 : null) : size - low === 0.5 ? low + low % 2 : null;
  const text = Number(even ?? size.toFixed(digits)).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return n < 0 ? `-${text}` : text;
}

function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    // What would be written as 1024 gets the next unit.
    if (Math.abs(n) < (unit === "B" ? 1023.5 : 1023.95)) return `${rounded(n, unit === "B" ? 0 : 1)} ${unit}`;
    n /= 1024;
  }
  return `${rounded(n, 1)} TiB`;
}

function flops(n) {
  for (const unit of ["", "k", "M", "G", "T"]) {
    // Three digits: 99.9 M, then 100 M.
    if (Math.abs(n) < 999.5 || unit === "T") return `${rounded(n, unit && Math.abs(n) < 99.95 ? 1 : 0)} ${unit}FLOP`;
    n /= 1000;
  }
}
