/** Runs the worker of the search in a hidden frame in pages opened from disk, where browsers refuse workers. */
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inner = this.frame.contentWindow;
    window.addEventListener("message", (event) => {
      if (event.source !== inner) return;
      event.stopImmediatePropagation();
      this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      this.onmessage?.(event);
    });
    this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve));
    inner.document.open();
    // The script of the worker posts to `self`, which is the frame.
    inner.document.write(`<script>postMessage = (data) => parent.postMessage(data, "*")</script><script src="${url}"></script>`);
    inner.document.close();
  }

  postMessage(data) {
    this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
}
if (location.protocol === "file:") window.Worker = FrameWorker;
