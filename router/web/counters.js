// How fast an answer comes: counts tokens, and times the first one and those after it. Knows no page.

export class Counters {
  #started;
  #first = null;
  #last = null;
  #numFirst = 0;
  numTokens = 0;

  /** `now` is in milliseconds, here and below. */
  constructor(now) {
    this.#started = now;
  }

  /** `count` tokens came. */
  add(count, now) {
    if (!count) return;
    if (this.#first === null) {
      this.#first = now;
      this.#numFirst = count;
    }
    this.#last = now;
    this.numTokens += count;
  }

  /** Milliseconds until the first token; null before it. */
  get firstTokenMs() {
    return this.#first === null ? null : this.#first - this.#started;
  }

  /** Tokens a second after the first ones; null while that says nothing. */
  get tokensPerSecond() {
    const more = this.numTokens - this.#numFirst;
    return more && this.#last > this.#first ? (more * 1000) / (this.#last - this.#first) : null;
  }
}
