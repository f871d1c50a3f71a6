package lifecycle_test

import (
	"crypto/rand"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cloudproviderapi "k8s.io/cloud-provider/api"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/controllers/lifecycle"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/test/ctest"
)

const (
	grace  = 5 * time.Minute
	absent = time.Hour
)

// Settings of the histories.
var (
	byDefault = config.CompiledLifecycle{GracePeriod: grace, AbsentPeriod: absent}
	optIn     = config.CompiledLifecycle{GracePeriod: grace, AbsentPeriod: absent, OutOfServiceTaint: true, Discovery: true}
	dryRun    = config.CompiledLifecycle{GracePeriod: grace, AbsentPeriod: absent, OutOfServiceTaint: true, Discovery: true, DryRun: true}
)

// checkFunc fails unless the outcomes by default and with all opt-ins are as wanted. A dry run must change nothing.
type checkFunc func(when string, byDefault, optIn outcome)

// history is a sequence of events in a world.
type history struct {
	run func(w *world, check checkFunc)
	// changes is false if nothing may change with any setting.
	changes bool
}

func changing(run func(w *world, check checkFunc)) history { return history{run: run, changes: true} }

func never(run func(w *world)) history {
	return history{run: func(w *world, check checkFunc) {
		run(w)
		check("at the end", outcome{}, outcome{})
	}}
}

func deleted(names ...string) outcome { return outcome{deleted: names} }

func histories() map[string]history {
	return map[string]history{
		"reboot": never(func(w *world) {
			w.announce("w-1", runtime.MachineStageRebooting)
			w.powerOff("w-1")
			w.advance(time.Hour)
			w.boot("w-1", "w-1", runtime.MachineStageRunning)
			w.ready("w-1")
			w.advance(grace)
		}),
		"upgrade": never(func(w *world) {
			w.announce("w-1", runtime.MachineStageUpgrading)
			w.powerOff("w-1")
			w.advance(2 * grace)
			w.boot("w-1", "w-1", runtime.MachineStageBooting)
			w.advance(2 * grace)
		}),
		"no response": never(func(w *world) {
			w.powerOff("w-1")
			w.advance(2 * time.Hour)
		}),
		"not ready": never(func(w *world) {
			w.notReady("w-1")
			w.advance(2 * time.Hour)
		}),
		"reset": changing(func(w *world, check checkFunc) {
			w.announce("w-1", runtime.MachineStageResetting)
			w.powerOff("w-1")
			w.advance(grace - tick)
			check("before the grace period has passed", outcome{}, outcome{})
			w.advance(2 * tick)
			check("after the grace period", deleted("w-1"), deleted("w-1"))
		}),
		"reset, and a kubelet that Kubernetes marks late": changing(func(w *world, check checkFunc) {
			w.announce("w-1", runtime.MachineStageResetting)
			w.stop("w-1")
			w.advance(time.Hour)
			check("before the node is marked", outcome{}, outcome{})
			w.notReady("w-1")
			w.advance(grace + tick)
			check("after the grace period", deleted("w-1"), deleted("w-1"))
		}),
		"reset of a machine whose Node an administrator restricts": changing(func(w *world, check checkFunc) {
			restrictions := map[string]string{
				"w-1": `{"metadata":{"labels":{"tenant.node-restriction.kubernetes.io/name":"a"}}}`,
				"w-2": `{"spec":{"taints":[{"key":"example.com/quarantine","effect":"NoExecute"}]}}`,
				"w-3": `{"spec":{"unschedulable":true,"taints":[{"key":"node.kubernetes.io/unschedulable","effect":"NoSchedule"},{"key":"example.com/rule","value":"a","effect":"NoSchedule"}]},` +
					`"metadata":{"labels":{"rule.node-restriction.kubernetes.io/name":"a"}}}`,
			}

			for name, patch := range restrictions {
				w.announce(name, runtime.MachineStageResetting)
				w.powerOff(name)
				w.patch(name, patch)
			}

			w.advance(time.Hour)
			w.awaitEvent(lifecycle.ReasonDeletionPaused)
			check("after an hour", deleted("w-3"), deleted("w-3"))
		}),
		"reset while the node is ready": never(func(w *world) {
			w.announce("w-1", runtime.MachineStageResetting)
			w.powerOff("w-1")
			w.ready("w-1")
			w.advance(2 * grace)
		}),
		"reset that takes long": never(func(w *world) {
			w.announce("w-1", runtime.MachineStageResetting)
			w.notReady("w-1")
			w.advance(2 * grace)
		}),
		"reset of some partitions, then a crash": never(func(w *world) {
			w.announce("w-1", runtime.MachineStageResetting)
			w.powerOff("w-1")
			w.advance(grace - tick)
			w.boot("w-1", "w-1", runtime.MachineStageBooting)
			w.powerOff("w-1")
			w.advance(time.Hour)
		}),
		"node re-created": never(func(w *world) {
			w.announce("w-1", runtime.MachineStageResetting)
			w.powerOff("w-1")
			w.advance(grace - tick)
			w.Remove(w.node("w-1"))
			w.register("w-1", w.machines["w-1"].Address())
			w.await("w-1", inventory.Unreachable)
			w.advance(time.Hour)
		}),
		"power off for an hour": changing(func(w *world, check checkFunc) {
			w.announce("w-1", runtime.MachineStageShuttingDown)
			w.powerOff("w-1")
			w.waitForIdle()
			check("at once", outcome{shutdown: []string{"w-1"}}, outcome{shutdown: []string{"w-1"}})
			w.advance(time.Hour)
			check("after an hour", outcome{shutdown: []string{"w-1"}}, outcome{shutdown: []string{"w-1"}, outOfService: []string{"w-1"}})
			w.boot("w-1", "w-1", runtime.MachineStageBooting)
			w.waitForIdle()
			check("after the start", outcome{}, outcome{})
		}),
		"power off, leader change, and on": changing(func(w *world, check checkFunc) {
			w.announce("w-1", runtime.MachineStageShuttingDown)
			w.powerOff("w-1")
			w.advance(2 * grace)
			w.lead()
			w.await("w-1", inventory.Unreachable)
			w.advance(grace)
			check("with the new leader", outcome{shutdown: []string{"w-1"}}, outcome{shutdown: []string{"w-1"}, outOfService: []string{"w-1"}})
			w.ready("w-1")
			w.waitForIdle()
			check("when the node is ready", outcome{}, outcome{})
		}),
		"reset, and back while the controller cannot see it": never(func(w *world) {
			w.announce("w-1", runtime.MachineStageResetting)
			w.powerOff("w-1")
			w.advance(grace - tick)
			w.booted("w-1")
			w.waitForIdle()
			w.notReady("w-1")
			w.advance(time.Hour)
		}),
		"reset in less time than Kubernetes notices, and back while the controller cannot see it": never(func(w *world) {
			w.announce("w-1", runtime.MachineStageResetting)
			w.stop("w-1")
			w.booted("w-1")
			w.advance(grace)
			w.notReady("w-1")
			w.advance(time.Hour)
		}),
		"leader change in the middle": never(func(w *world) {
			w.announce("w-1", runtime.MachineStageResetting)
			w.powerOff("w-1")
			w.advance(grace - tick)
			w.lead()
			w.await("w-1", inventory.Unreachable)
			w.advance(time.Hour)
		}),
		"move to another address, and a shutdown and a reset there": changing(func(w *world, check checkFunc) {
			w.impersonate("moved", w.entry("w-1").Last.EphemeralID)
			w.rename("moved", "w-1")
			w.await("w-1", inventory.Current)
			w.record("w-1", w.entry("w-1").Last)
			w.announceAs("moved", "w-1", runtime.MachineStageShuttingDown)
			w.waitForIdle()
			check("after the shutdown", outcome{shutdown: []string{"w-1"}}, outcome{shutdown: []string{"w-1"}})
			w.boot("moved", "w-1", runtime.MachineStageRunning)
			w.announceAs("moved", "w-1", runtime.MachineStageResetting)
			w.advance(grace + tick)
			check("after the reset", deleted("w-1"), deleted("w-1"))
		}),
		"instance re-created under its name": never(func(w *world) {
			w.powerOff("w-1")
			w.advance(grace)
			require.NoError(w, w.machines["w-1"].SetIdentity(w.Context(), rand.Text(), newUUID()))
			w.boot("w-1", "w-1", runtime.MachineStageRunning)
			w.advance(2 * grace)
			w.ready("w-1")
			w.advance(grace)
		}),
		"address taken by another machine": changing(func(w *world, check checkFunc) {
			w.powerOff("w-1")
			w.advance(grace)
			require.NoError(w, w.machines["w-1"].SetIdentity(w.Context(), rand.Text(), newUUID()))
			w.rename("w-1", "w-9")
			w.register("w-9", w.machines["w-1"].Address())
			w.boot("w-1", "w-9", runtime.MachineStageRunning)
			w.ready("w-9")
			w.await("w-1", inventory.Mismatch)
			w.advance(2 * time.Hour)
			check("while the machine is discovered", outcome{}, outcome{})
			w.leave("w-1")
			w.advance(absent - tick)
			check("before the period has passed", outcome{}, outcome{})
			w.advance(2 * tick)
			check("after the period", outcome{}, deleted("w-1"))
		}),
		"rename": changing(func(w *world, check checkFunc) {
			w.rename("w-1", "new")
			w.await("w-1", inventory.Mismatch)
			w.register("new", w.machines["w-1"].Address())
			w.await("new", inventory.Current)
			w.ready("new")
			w.advance(grace)
			check("while the old node is ready", outcome{}, outcome{})
			w.notReady("w-1")
			w.advance(grace - tick)
			check("before the grace period has passed", outcome{}, outcome{})
			w.advance(2 * tick)
			check("after the grace period", deleted("w-1"), deleted("w-1"))
		}),
		"rename and back": never(func(w *world) {
			w.rename("w-1", "new")
			w.await("w-1", inventory.Mismatch)
			w.notReady("w-1")
			w.register("new", w.machines["w-1"].Address())
			w.await("new", inventory.Current)
			w.advance(grace - tick)
			w.rename("w-1", "w-1")
			w.await("w-1", inventory.Current)
			w.ready("w-1")
			w.Remove(w.node("new"))
			w.registered.Delete("new")
			w.advance(2 * grace)
		}),
		"clone of the disk": never(func(w *world) {
			w.powerOff("w-1")
			w.joinClone(w.entry("w-1").Last.NodeID)
			w.advance(time.Hour)
		}),
		"clone of the disk of a machine that was off when talos-ccm was installed": never(func(w *world) {
			w.powerOff("w-1")
			nodeID := w.entry("w-1").Last.NodeID
			w.unrecord("w-1")
			w.lead()
			w.await("w-1", inventory.Unreachable)
			w.joinClone(nodeID)
			w.advance(time.Hour)
		}),
		"swap of two addresses": never(func(w *world) {
			one, two := w.entry("w-1").Last, w.entry("w-2").Last
			w.powerOff("w-1")
			w.powerOff("w-2")
			require.NoError(w, w.machines["w-1"].SetIdentity(w.Context(), two.NodeID, two.UUID()))
			require.NoError(w, w.machines["w-2"].SetIdentity(w.Context(), one.NodeID, one.UUID()))
			w.rename("w-1", "w-2")
			w.rename("w-2", "w-1")
			w.machines["w-1"].Start()
			w.machines["w-2"].Start()
			w.await("w-1", inventory.Mismatch)
			w.await("w-2", inventory.Mismatch)
			w.advance(time.Hour)
			w.address("w-1", w.machines["w-2"].Address().String())
			w.await("w-1", inventory.Current)
			w.advance(time.Hour)
			w.address("w-2", w.machines["w-1"].Address().String())
			w.await("w-2", inventory.Current)
			w.advance(time.Hour)
		}),
		"network split of half of the machines": changing(func(w *world, check checkFunc) {
			w.announce("w-1", runtime.MachineStageResetting)

			for _, name := range []string{"w-1", "w-2", "w-3"} {
				w.powerOff(name)
			}

			w.advance(time.Hour)
			w.awaitEvent(lifecycle.ReasonDeletionPaused)
			check("during the split", outcome{}, outcome{})
			w.boot("w-2", "w-2", runtime.MachineStageRunning)
			w.advance(tick)
			check("after the split", deleted("w-1"), deleted("w-1"))
		}),
		"more nodes without a machine than machines": never(func(w *world) {
			w.announce("w-1", runtime.MachineStageResetting)
			w.powerOff("w-1")

			for i := range len(w.machines) + 1 {
				fake := fmt.Sprintf("fake-%d", i)
				w.register(fake, w.machines["w-1"].Address())
				w.await(fake, inventory.Unreachable)
			}

			w.advance(time.Hour)
			w.awaitEvent(lifecycle.ReasonDeletionPaused)
		}),
		"end of most machines": changing(func(w *world, check checkFunc) {
			off := []string{"w-2", "w-3", "w-4"}
			w.announce("w-1", runtime.MachineStageResetting)
			w.powerOff("w-1")

			for _, name := range off {
				w.announce(name, runtime.MachineStageShuttingDown)
				w.powerOff(name)
			}

			w.advance(grace + tick)
			check("after the grace period", outcome{deleted: []string{"w-1"}, shutdown: off}, outcome{deleted: []string{"w-1"}, shutdown: off, outOfService: off})
		}),
		"clock jump": changing(func(w *world, check checkFunc) {
			w.announce("w-1", runtime.MachineStageResetting)
			w.powerOff("w-1")
			w.waitForIdle()
			w.clock.Step(24 * time.Hour)
			w.waitForIdle()
			w.advance(grace - 4*tick)
			check("after the jump", outcome{}, outcome{})
			w.advance(4 * tick)
			check("after the grace period", deleted("w-1"), deleted("w-1"))
		}),
		"scaled down": changing(func(w *world, check checkFunc) {
			w.patch("w-1", `{"spec":{"taints":[{"key":"ToBeDeletedByClusterAutoscaler","effect":"NoSchedule"}]}}`)
			w.stop("w-1")
			w.advance(2 * grace)
			check("while the kubelet reports", outcome{}, outcome{})
			w.notReady("w-1")
			w.advance(grace - tick)
			check("before the grace period has passed", outcome{}, outcome{})
			w.advance(2 * tick)
			check("after the grace period", deleted("w-1"), deleted("w-1"))
		}),
		"absent from discovery": changing(func(w *world, check checkFunc) {
			w.powerOff("w-1")
			w.leave("w-1")
			w.advance(absent - tick)
			check("before the period has passed", outcome{}, outcome{})
			w.advance(2 * tick)
			check("after the period", outcome{}, deleted("w-1"))
		}),
		"absent from discovery, but the node is ready or the machine responds": never(func(w *world) {
			w.leave("w-1")
			w.leave("w-2")
			w.powerOff("w-1")
			w.ready("w-1")
			w.notReady("w-2")
			w.advance(absent + grace)
		}),
		"node that is not selected": never(func(w *world) {
			w.patch("w-1", `{"metadata":{"labels":{"unmanaged":"true"}}}`)
			w.announce("w-1", runtime.MachineStageResetting)
			w.powerOff("w-1")
			w.announce("w-2", runtime.MachineStageShuttingDown)
			w.patch("w-2", `{"metadata":{"labels":{"unmanaged":"true"}}}`)
			w.powerOff("w-2")
			w.advance(2 * grace)
		}),
	}
}

// attacks are histories in which a machine that is not the recorded one announces what would have the Node of w-1 deleted
// or tainted, while the machine of w-1 is down.
func attacks() map[string]history {
	list := map[string]history{}

	for name, reason := range map[string]string{"reset": lifecycle.ReasonDeletionPaused, "shutdown": lifecycle.ReasonShutdown} {
		for before, prepare := range map[string]func(w *world){
			"": func(*world) {}, " after a change of leader": (*world).lead, " for a Node without a record": func(w *world) { w.unrecord("w-1") },
			" for such a Node after a change of leader": func(w *world) { w.unrecord("w-1"); w.lead() },
		} {
			list[name+" at another address"+before] = never(func(w *world) {
				w.impersonate("impostor", "volume of impostor")
				prepare(w)
				w.rename("impostor", "w-1")
				w.await("w-1", inventory.Current)
				w.announceAs("impostor", "w-1", stages[name])
				w.advance(time.Hour)
				w.awaitEventOn("w-1", reason)
			})
		}

		list[name+" at the recorded address by another machine"] = never(func(w *world) {
			w.powerOff("w-1")
			w.lead()
			require.NoError(w, w.machines["w-1"].FormatVolume(w.Context(), constants.EphemeralPartitionLabel, "volume of impostor"))
			w.boot("w-1", "w-1", runtime.MachineStageRunning)
			w.announceAs("w-1", "w-1", stages[name])
			w.advance(time.Hour)
			w.awaitEventOn("w-1", reason)
		})
	}

	for of, prepare := range map[string]func(w *world){
		"Node": func(*world) {}, "Node without a record": func(w *world) { w.unrecord("w-1") },
		"Node after a change of leader": func(w *world) {
			w.lead()
			w.rename("evil", "w-1")
			w.await("w-1", inventory.Current)
			w.rename("evil", "evil")
		},
	} {
		list["rename at another address of a "+of] = never(func(w *world) {
			w.impersonate("evil", "volume of evil")
			prepare(w)
			w.register("evil", w.machines["evil"].Address())
			w.await("evil", inventory.Current)
			w.await("w-1", inventory.Mismatch)
			w.advance(time.Hour)
			w.awaitEventOn("w-1", lifecycle.ReasonDeletionPaused)
		})
	}

	return list
}

var stages = map[string]runtime.MachineStage{"reset": runtime.MachineStageResetting, "shutdown": runtime.MachineStageShuttingDown}

// impersonate powers off the machine of w-1, adds another one with its identity, and makes the Node list the address of that.
// The volume is not read again at once, and must exist before.
func (w *world) impersonate(name, volume string) {
	w.Helper()

	last := w.entry("w-1").Last
	w.powerOff("w-1")
	w.addMachine(name)
	require.NoError(w, w.machines[name].SetIdentity(w.Context(), last.NodeID, last.UUID()))
	require.NoError(w, w.machines[name].FormatVolume(w.Context(), constants.EphemeralPartitionLabel, volume))
	w.address("w-1", w.machines[name].Address().String())
}

// joinClone adds a machine with the disk of another one on other hardware, and its Node.
func (w *world) joinClone(nodeID string) {
	w.Helper()
	w.addMachine("clone")
	require.NoError(w, w.machines["clone"].SetIdentity(w.Context(), nodeID, newUUID()))
	w.register("clone", w.machines["clone"].Address())
	w.await("clone", inventory.Current)
	w.ready("clone")
}

// announceAs sets the stage of a machine that responds under a nodename, and powers it off.
func (w *world) announceAs(name, nodename string, stage runtime.MachineStage) {
	w.Helper()
	require.NoError(w, w.machines[name].SetStage(w.Context(), stage))
	ctest.Eventually(w, "the stage is known", func() bool { return w.entry(nodename).Last.Stage == stage })
	require.NoError(w, w.machines[name].Stop(w.Context()))
	w.await(nodename, inventory.Unreachable)
	w.notReady(nodename)
}

// address changes the address of a Node, as its kubelet does.
func (w *world) address(name, ip string) {
	w.Helper()
	w.PatchNode(w.node(name), "kubelet", fmt.Sprintf(`{"status":{"addresses":[{"type":"InternalIP","address":%q}]}}`, ip), "status")
}

func TestController_Histories(t *testing.T) {
	list := histories()
	maps.Copy(list, attacks())

	for name, history := range list {
		for _, variant := range []struct {
			name     string
			settings config.CompiledLifecycle
		}{{"default", byDefault}, {"opt-in", optIn}, {"dry run", dryRun}} {
			if variant.settings.DryRun && !history.changes {
				continue
			}

			t.Run(name+"/"+variant.name, func(t *testing.T) {
				t.Parallel()

				w := newWorld(t, variant.settings, workers(4)...)

				for _, name := range workers(4) {
					w.await(name, inventory.Current)
				}

				history.run(w, func(when string, byDefault, optIn outcome) {
					t.Helper()

					switch variant.name {
					case "default":
						w.expect(when, byDefault)
					case "opt-in":
						w.expect(when, optIn)
					default:
						if len(optIn.deleted) > 0 {
							w.awaitEvent(lifecycle.ReasonDeletionDisabled)
						}

						w.expect(when, outcome{})
					}
				})
			})
		}
	}
}

func TestController_LimitsDeletionsAcrossLeaders(t *testing.T) {
	t.Parallel()

	settings := config.CompiledLifecycle{GracePeriod: time.Minute, AbsentPeriod: absent}
	w := newWorld(t, settings, workers(6)...)

	for _, name := range []string{"w-1", "w-2"} {
		w.await(name, inventory.Current)
		w.announce(name, runtime.MachineStageResetting)
		w.powerOff(name)
	}

	w.advance(3 * time.Minute)
	w.awaitEvent(lifecycle.ReasonDeletionLimited)

	first := w.outcome().deleted
	require.Len(t, first, 1)

	// The next leader knows the first deletion, but not that the second machine was reset.
	w.lead()
	w.await("w-3", inventory.Current)
	w.announce("w-3", runtime.MachineStageResetting)
	w.powerOff("w-3")
	w.advance(3 * time.Minute)
	w.expect("within ten minutes", deleted(first...))
	w.advance(8 * time.Minute)
	w.expect("after ten minutes", deleted(append(first, "w-3")...))

	if got := w.events(lifecycle.ReasonDeleting); len(got) != 2 || !strings.Contains(got[0], "being reset") {
		t.Errorf("got Events %v", got)
	}
}

func TestController_ReportsMachineWithoutProofAfterADay(t *testing.T) {
	t.Parallel()

	w := newWorld(t, byDefault, workers(4)...)
	w.await("w-1", inventory.Current)
	w.powerOff("w-1")
	w.advance(23 * time.Hour)
	require.Empty(t, w.events(lifecycle.ReasonSilent))
	w.advance(2 * time.Hour)
	w.awaitEvent(lifecycle.ReasonSilent)
	w.expect("after a day", outcome{})
}

// Discovery has deleted the Node of a machine that was cut off while it worked. Its kubelet does not register again.
// Not parallel: the controllers of all tests set the same metric.
func TestController_ReportsMemberWithoutNode(t *testing.T) {
	w := newWorld(t, optIn, workers(4)...)
	w.await("w-1", inventory.Current)
	w.discover(controlPlane, "w-2", "w-3", "w-4")
	w.powerOff("w-1")
	w.leave("w-1")
	w.advance(absent + tick)
	w.expect("while the machine is cut off", deleted("w-1"))

	w.discover(controlPlane, "w-1", "w-2", "w-3", "w-4")
	w.advance(35*time.Minute - tick)
	require.Empty(t, w.events(lifecycle.ReasonMissing), "the member may be a machine that no longer exists")
	w.advance(2 * tick)
	w.awaitEvent(lifecycle.ReasonMissing)
	w.awaitMissing(1)

	events := w.events(lifecycle.ReasonMissing)
	require.Len(t, events, 1)
	assert.Contains(t, events[0], w.node("w-1"))
	assert.Contains(t, events[0], fmt.Sprintf("talosctl -n %s service kubelet restart", w.machines["w-1"].Address()))

	w.register("w-1", w.machines["w-1"].Address())
	w.ready("w-1")
	w.awaitMissing(0)

	w.Remove(w.node("w-1"))
	w.advance(30 * time.Minute)
	w.awaitMissing(0)
	w.advance(6 * time.Minute)
	w.awaitMissing(1)

	w.discover(controlPlane, "w-2", "w-3", "w-4")
	w.awaitMissing(0)

	reported := len(w.events(lifecycle.ReasonMissing))

	w.advance(time.Hour) // in which a missing member would be reported again
	assert.Len(t, w.events(lifecycle.ReasonMissing), reported)
}

// awaitMissing waits until the metric counts n members without a Node.
func (w *world) awaitMissing(n float64) {
	w.Helper()

	want := map[string]float64{}
	if n > 0 {
		want[lifecycle.ReasonMissing] = n
	}

	ctest.Eventually(w, fmt.Sprintf("talosccm_lifecycle_nodes is %v", want), func() bool {
		w.advance(tick)

		families, err := legacyregistry.DefaultGatherer.Gather()
		require.NoError(w, err)

		got := map[string]float64{}

		for _, family := range families {
			for _, m := range family.GetMetric() {
				if family.GetName() == "talosccm_lifecycle_nodes" && m.GetLabel()[0].GetValue() == lifecycle.ReasonMissing {
					got[lifecycle.ReasonMissing] = m.GetGauge().GetValue()
				}
			}
		}

		return maps.Equal(got, want)
	})
}

func TestController_KeepsOutOfServiceTaintOfOthers(t *testing.T) {
	t.Parallel()

	w := newWorld(t, optIn, workers(4)...)
	w.patch("w-1", fmt.Sprintf(`{"spec":{"taints":[{"key":%q,"value":"nodeshutdown","effect":"NoExecute"}]}}`, corev1.TaintNodeOutOfService))
	w.await("w-1", inventory.Current)
	w.announce("w-1", runtime.MachineStageShuttingDown)
	w.powerOff("w-1")
	w.advance(2 * grace)
	w.boot("w-1", "w-1", runtime.MachineStageRunning)
	w.ready("w-1")
	w.waitForIdle()
	w.expect("after the start", outcome{outOfService: []string{"w-1"}})
}

// The next leader has not seen the announcement of the machine that the earlier leader ran on.
func TestController_RecordsResetOfItsOwnMachine(t *testing.T) {
	for name, test := range map[string]struct {
		settings config.CompiledLifecycle
		stage    runtime.MachineStage
		after    func(w *world)
		want     outcome
	}{
		"reset":                         {byDefault, runtime.MachineStageResetting, func(*world) {}, deleted("w-1")},
		"shutdown":                      {byDefault, runtime.MachineStageShuttingDown, func(*world) {}, outcome{}},
		"dry run":                       {dryRun, runtime.MachineStageResetting, func(*world) {}, outcome{}},
		"boot before the last response": {byDefault, runtime.MachineStageResetting, func(w *world) { w.booted("w-1"); w.notReady("w-1") }, outcome{}},
		"kubelet that reports":          {byDefault, runtime.MachineStageResetting, func(w *world) { w.SetReady(w.node("w-1"), corev1.ConditionFalse) }, outcome{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			w := newWorld(t, test.settings, workers(4)...)
			for _, name := range workers(4) {
				w.await(name, inventory.Current)
			}

			w.setLocal("w-1")
			w.announce("w-1", test.stage)
			w.stop("w-1")
			w.lead() // before the Node is not ready, or the first leader sets the shutdown taint
			w.notReady("w-1")
			w.await("w-1", inventory.Unreachable)
			test.after(w)
			w.advance(2 * grace)
			w.expect("under the next leader", test.want)
		})
	}
}

// Another controller may set the shutdown taint, too.
func TestController_DryRunRemovesOwnTaints(t *testing.T) {
	t.Parallel()

	w := newWorld(t, optIn, workers(4)...)

	for _, name := range []string{"w-1", "w-2"} {
		w.await(name, inventory.Current)
		w.announce(name, runtime.MachineStageShuttingDown)
		w.notReady(name)
		w.advance(tick)
	}

	w.patch("w-2", fmt.Sprintf(`{"spec":{"taints":[{"key":%q,"effect":"NoSchedule"}]}}`, cloudproviderapi.TaintNodeShutdown))
	w.stop("w-1")
	w.stop("w-2")
	w.advance(2 * grace)
	w.expect("before the dry run", outcome{shutdown: []string{"w-1", "w-2"}, outOfService: []string{"w-1", "w-2"}})

	w.set(dryRun)
	w.advance(2 * tick)
	w.expect("in the dry run", outcome{shutdown: []string{"w-2"}})
}

// A machine is reset without its STATE partition and boots in time. Its kubelet reports that it is not ready, because it
// pulls images again. The reflector, which waits for up to 78 s between attempts, has not detected the boot yet. If the
// Node were deleted now, the kubelet would not register again before it restarts.
func TestController_KeepsNodeWhoseKubeletReportsNotReady(t *testing.T) {
	t.Parallel()

	w := newWorld(t, byDefault, workers(4)...)
	for _, name := range workers(4) {
		w.await(name, inventory.Current)
	}

	w.announce("w-1", runtime.MachineStageResetting)
	w.powerOff("w-1")
	w.advance(grace - tick)
	w.SetReady(w.node("w-1"), corev1.ConditionFalse)
	w.advance(3 * tick)
	w.expect("with a kubelet that reports", outcome{})
}

// A Node changes between the controller's decision and the deletion.
func TestController_KeepsNodeThatChangesDuringDeletion(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		before string // the method of the request before which the Node changes
		change func(w *world)
	}{
		"not selected any more": {http.MethodGet, func(w *world) { w.patch("w-1", `{"metadata":{"labels":{"unmanaged":"true"}}}`) }},
		"ready before the read": {http.MethodGet, func(w *world) { w.ready("w-1") }},
		"ready":                 {http.MethodDelete, func(w *world) { w.ready("w-1") }},
		"registered again": {http.MethodDelete, func(w *world) { // the machine is installed again
			assert.NoError(w, w.Client.CoreV1().Nodes().Delete(w.Context(), w.node("w-1"), metav1.DeleteOptions{}))
			w.register("w-1", w.machines["w-1"].Address())
			w.ready("w-1")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			w := newWorld(t, byDefault, workers(4)...)
			for _, name := range workers(4) {
				w.await(name, inventory.Current)
			}

			wait := w.transport.Overtake(w, test.before, w.node("w-1"), 1, func() { test.change(w) })
			w.announce("w-1", runtime.MachineStageResetting)
			w.powerOff("w-1")
			w.advance(2 * grace)
			wait()
			w.waitForIdle()
			w.expect("after the change", outcome{})
		})
	}
}
