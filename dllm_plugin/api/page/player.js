"use strict";
// Shows the canvases of an answer one after the other, at a speed that eyes can follow.

/** Plays one turn at a time; `changed` is called after each canvas. */
class Player {
  constructor(changed) {
    this.changed = changed;
    this.turn = null;
    this.tone = "forward";
    this.speed = 1;
    this.timer = null;
    this.plays = false;
  }

  /** Take a turn, and follow it from its first canvas on. */
  open(turn) {
    this.pause();
    this.turn = turn;
    this.seek(0);
    this.play();
  }

  play() {
    this.pause();
    this.plays = true;
    if (this.turn.place === this.turn.newest && this.turn.state !== "running") this.seek(0);
    this.schedule();
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.plays = false;
  }

  /** Show one canvas. */
  seek(place) {
    this.turn.show(place, this.tone);
    this.changed();
  }

  /** Show the newest canvas at once, and stop there. */
  finish() {
    this.pause();
    this.seek(this.turn.newest);
  }

  /** Go on if the next canvas has arrived; frames that come later call this again. */
  schedule() {
    if (!this.plays) this.changed();
    if (!this.plays || this.timer !== null) return;
    if (this.turn.place < this.turn.newest) {
      const delay = this.turn.place === 0 ? 0 : delayOf(this.turn.newest, this.speed);
      this.timer = setTimeout(() => this.step(), delay);
    } else if (this.turn.state !== "running") {
      this.plays = false;
    }
    this.changed();
  }

  step() {
    this.timer = null;
    const { place, newest } = this.turn;
    this.turn.show(this.speed === 0 ? newest : place + 1, this.tone);
    this.schedule();
  }
}
