// Colour code: strings, comments, numbers and keywords that most languages share, in one pass without backtracking.

const WORDS = new Set(("abstract and as assert async await begin bool boolean break byte case catch char class const "
  + "constexpr continue crate def default defer del delete do done double elif else elseif elsif end enum esac except "
  + "export extends extern false False fi final finally float fn for foreach from func function global go goto if impl "
  + "implements import in include inline instanceof int interface is lambda let local long loop match mod module mut "
  + "namespace new nil None nonlocal not null nullptr object of operator or override package pass private protected pub "
  + "public raise readonly ref require return self short signed sizeof static string struct super switch template then "
  + "this throw throws trait true True try type typedef typename typeof undefined union unless unsigned until use using "
  + "var virtual void where while with yield select insert update into values join group order by create table drop "
  + "alter set SELECT FROM WHERE INSERT UPDATE DELETE INTO VALUES JOIN LEFT RIGHT INNER OUTER ON GROUP ORDER BY LIMIT "
  + "CREATE TABLE DROP ALTER SET AND OR NOT NULL AS IN IS").split(" "));
const PLAIN = new Set(["", "text", "txt", "plain", "plaintext", "console", "output", "markdown", "md", "diff"]);
const HASH = /^(py|python|sh|bash|zsh|shell|rb|ruby|yaml|yml|toml|ini|perl|pl|r|make|makefile|dockerfile|nix|jl|julia|elixir|conf)$/;
const DASHES = /^(sql|lua|haskell|hs|ada|vhdl)$/;
const MAX = 50000;

const STRING = String.raw`"""[^]*?(?:"""|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|${"`"}(?:[^${"`"}\\]|\\.)*${"`"}?`;
const NUMBER = String.raw`\b0[xX][0-9a-fA-F_]+|\b\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?`;
const NAME = String.raw`[\p{L}_$][\p{L}\d_$]*`;

function pattern(lang) {
  let comment = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;
  if (HASH.test(lang)) comment = String.raw`#[^\n]*`;
  else if (DASHES.test(lang)) comment = String.raw`--[^\n]*`;
  else if (/^(html|xml|svg)$/.test(lang)) comment = String.raw`<!--[^]*?(?:-->|$)`;
  return new RegExp(`(${comment})|(${STRING})|(${NUMBER})|(${NAME})`, "gu");
}

// Fill `target` with the code, coloured if its language is named.
export function highlight(target, code, lang) {
  if (PLAIN.has(lang) || code.length > MAX) {
    target.append(code);
    return;
  }
  let last = 0;
  for (const match of code.matchAll(pattern(lang))) {
    const kind = match[1] ? "c" : match[2] ? "s" : match[3] ? "n" : WORDS.has(match[4]) ? "k" : "";
    if (!kind) continue;
    target.append(code.slice(last, match.index));
    const span = document.createElement("span");
    span.className = `tok-${kind}`;
    span.textContent = match[0];
    target.append(span);
    last = match.index + match[0].length;
  }
  target.append(code.slice(last));
}
