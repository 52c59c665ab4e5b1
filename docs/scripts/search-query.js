// Asks the search for the sections that have all words of a query, and only if there are none, for those that have some of them. The
// search itself takes every word as optional, also "not" and "the", and a dash before a word as an operator. A section that has a word
// itself precedes those that have only its beginning.
const QUERY = 2;
const RESULT = 3;
const SMALL = new Set(
  (
    "a after am an and any are as at be but by can could did do does for from get had has have how i if in into is it its just me " +
    "my no not of on or should so some that the then there this to was we were what when where which while who why will with would you your"
  ).split(" "),
);

window.Worker = class extends window.Worker {
  constructor(...given) {
    super(...given);
    this.fallbacks = []; // for each query that is under way: what to ask if no section has all of its words
    this.addEventListener("message", (event) => {
      if (event.data.type !== RESULT) return;
      const fallback = this.fallbacks.shift();
      if (fallback === undefined || event.data.data.items.length) return;
      if (this.fallbacks.length) return; // a newer query is under way, and its results are to be shown last
      event.stopImmediatePropagation();
      this.ask(fallback);
    });
  }

  ask(query, fallback) {
    this.fallbacks.push(fallback);
    super.postMessage({ type: QUERY, data: query });
  }

  postMessage(message) {
    if (message.type !== QUERY) {
      this.separator = new RegExp(message.data.config.separator);
      super.postMessage(message);
      return;
    }
    const all = message.data.replace(/[+*~^]/g, " ").split(this.separator).filter(Boolean);
    const large = all.filter((word) => !SMALL.has(word.toLowerCase()));
    const words = large.length ? large : all;
    this.ask(words.map((word) => `+${word}* ${word}^9`).join(" "), words.join(" "));
  }
};
