// Search for a site that is opened from disk: browsers start no Worker from a file:// page, so the worker's script runs in a
// hidden frame instead. Served over HTTP, the page keeps the browser's own Worker.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inside = this.frame.contentWindow;
    addEventListener("message", (event) => {
      if (event.source === inside) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
    });
    const page = inside.document;
    page.open();
    page.write("<!doctype html><body></body>");
    page.close();
    inside.postMessage = (data) => parentPost(inside, data);
    inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(page, each)), Promise.resolve());
    this.ready = load(page, url);
  }

  postMessage(data) {
    this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
  }

  terminate() {
    this.frame.remove();
  }
}

function parentPost(source, data) {
  dispatchEvent(new MessageEvent("message", { data: structuredClone(data), source }));
}

function load(page, url) {
  return new Promise((done, failed) => {
    const script = page.createElement("script");
    script.src = url;
    script.onload = done;
    script.onerror = failed;
    page.body.append(script);
  });
}

window.IFrameWorker = FrameWorker; // the name by which the theme's script knows that it runs in a frame
if (location.protocol === "file:") window.Worker = FrameWorker;
