import sys, os, subprocess
sys.path.insert(0,""+os.getcwd()+"/benchmarks")
import results as R
from pathlib import Path
work=Path("/work/results"); refs=Path("/work/refs")
def of(part, seed, names=None):
    return [r for r in R.runs(part, seed) if names is None or r.row in names]
order=[]
def three(seed): return of("stranger",seed,["opt-out-stranger"])+of("stranger-targets",seed)+of("main",seed,["opt-out","npo+rt"])+of("targets",seed,["opt-out"])
order += three(0)+of("main",0)+three(1)+three(2)+of("targets",0,["npo+rt"])+of("targets",0)
seen=set(); order=[r for r in order if not (r.name in seen or seen.add(r.name))]
if __name__=="__main__":
    mode=sys.argv[1]
    print(len(order))
    (work/"claims").mkdir(parents=True,exist_ok=True)
    if mode=="score":
        order=[R.Run(row,t,0,()) for row in R.BASELINES for t in R.TARGETS]+order
    for r in order:
        if mode=="score" and (work/f"{r.name}.json").exists(): continue
        if mode=="score" and r.row not in R.BASELINES and not (work/"checkpoints"/R.base()/r.name).is_dir(): continue
        try: open(work/"claims"/f"{mode}-{r.name}","x").close()
        except FileExistsError: continue
        import time; t=time.time()
        if mode=="train": print(r.name, R.checkpoint(r,work,refs), round(time.time()-t), flush=True)
        else:
            try: R.measure(r,work,refs); print("scored", r.name, round(time.time()-t), flush=True)
            except Exception as e: print("FAILED", r.name, repr(e)[:300], flush=True)
