// A page's elements and its server, as far as dit/playground/page.html uses them; run by Node
// before the script of the page. ids is the list of ids of the page.
class El { constructor(tag){this.tag=tag;this.children=[];this.h={};this.value="";this.textContent="";this.className="";}
 append(...c){this.children.push(...c)} prepend(...c){this.children.unshift(...c)}
 addEventListener(n,f){this.h[n]=f} }
const els={}; for(const i of ids) els[i]=new El(i); for (const n of ["num_steps","guidance"]) els[n].id=n;
const boxes=[];
globalThis.matchMedia=()=>({matches:true});
globalThis.document={getElementById:i=>els[i], createElement:t=>{const e=new El(t); if(t=="input")boxes.push(e); return e;},
 querySelector:s=>new El(s), querySelectorAll:s=>s.includes("range")?[els.num_steps,els.guidance]:boxes.filter(b=>b.type=="checkbox"&&b.checked)};
const sent=[];
globalThis.fetch=async(u,o)=>{ if(u=="about") return {ok:true, json:async()=>({variants:["a","b"],usual:{height:8,width:8,num_video_frames:1,num_steps:35,guidance:1.5,sampler:"heun"}, examples:["a cat"]})};
 sent.push(JSON.parse(o.body)); const lines=['{"step":1,"steps":2,"way":"data:1"}\n{"st','ep":2,"steps":2}\n','{"picture":"data:2","still":"data:3","waveform":"data:4","sound":"data:5","height":8,"width":8,"guidance":1.5}\n'];
 return {ok:true, body:new ReadableStream({start(c){for(const l of lines)c.enqueue(new TextEncoder().encode(l));c.close()}})}; };

// What the script then does, printed as JSON.
globalThis.submit = async () => {
  els.prompt.value = "a fox";
  els.seed.value = "3";
  await els.form.h.submit({ preventDefault() {} });
  const shown = els.results.children[0].children.map((figure) => {
    const [picture, , { children: [, way] }, play, wave, sound, words] = figure.children;
    const [prompt, note] = words.children;
    return { picture: picture.src, stages: way.max + 1, chosen: way.value, play: play.textContent, heard: [wave.src, sound.src, sound.hidden], prompt, text: note.textContent };
  });
  const said = { error: els.error.textContent, status: els.status.textContent };
  console.log(JSON.stringify({ sent, shown, placeholder: els.prompt.placeholder, ...said }));
};
