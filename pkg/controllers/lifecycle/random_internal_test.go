package lifecycle

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kuberuntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// installation is Talos on some hardware. It exists until it is wiped, whether or not it is switched on.
type installation struct {
	name, nodeID, uuid string
	address            int
	stage              runtime.MachineStage
	on                 bool
	split              bool // from the controller
	mute               bool // its kubelet cannot reach the API server
	// then happens in future ticks.
	then []func()
}

// universe is the ground truth of one history: the installations and Nodes that exist. It does not depend on what the
// controller observes.
type universe struct {
	*rand.Rand
	t             *testing.T
	seed          uint64
	clock         *clocktesting.FakeClock
	elapsed       time.Duration // without jumps of the clock
	installations []*installation
	nodes         map[string]*corev1.Node
	address       map[string]int           // of Nodes
	heartbeat     map[string]time.Duration // of Nodes
	names         int
	log           []string

	controller *Controller
	indexer    cache.Indexer
	inventory  *inventory.Inventory
	events     []corev1.Event
	deleted    []time.Duration
}

const (
	simulatedTick    = checkInterval
	simulatedGrace   = 5 * time.Minute
	simulatedTimeout = 40 * time.Second // after which Kubernetes marks a silent Node
)

func (u *universe) note(format string, args ...any) {
	u.log = append(u.log, u.elapsed.String()+" "+fmt.Sprintf(format, args...))
}

func (u *universe) newName() string {
	u.names++

	return fmt.Sprintf("n-%d", u.names)
}

func (u *universe) hardwareID() string {
	if u.IntN(8) == 0 { // a vendor that uses one UUID several times
		return "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
	}

	return fmt.Sprintf("%08x-0000-0000-0000-%012x", u.Uint32(), u.Uint64()&0xffffffffffff)
}

func (u *universe) freeAddress() int {
	for {
		address := u.IntN(1000)
		if !slices.ContainsFunc(u.installations, func(i *installation) bool { return i.address == address }) {
			return address
		}
	}
}

// at returns the installation that is on at an address.
func (u *universe) at(address int) *installation {
	for _, i := range u.installations {
		if i.address == address && i.on {
			return i
		}
	}

	return nil
}

func (u *universe) install(name, uuid string, address int) *installation {
	i := &installation{name: name, nodeID: fmt.Sprintf("id-%d", u.Uint64()), uuid: uuid, address: address}
	u.installations = append(u.installations, i)
	u.boot(i)

	return i
}

func (u *universe) wipe(i *installation) {
	i.on, i.then = false, nil
	u.installations = slices.DeleteFunc(u.installations, func(other *installation) bool { return other == i })
}

// boot switches on an installation. It is delayed while another machine has the address.
func (u *universe) boot(i *installation) {
	if other := u.at(i.address); other != nil && other != i {
		i.then = []func(){func() {}, func() { u.boot(i) }}

		return
	}

	i.on, i.stage = true, runtime.MachineStageBooting
	i.then = []func(){func() {}, func() {}, func() { i.stage = runtime.MachineStageRunning }}
}

// off announces a stage, and switches the installation off later.
func (u *universe) off(i *installation, stage runtime.MachineStage, after func()) {
	i.stage = stage
	i.then = slices.Repeat([]func(){func() {}}, 1+u.IntN(4))
	i.then = append(i.then, func() { i.on = false; after() })
}

// later calls do for an installation after up to n ticks.
func (u *universe) later(i *installation, n int, do func()) {
	i.then = append(slices.Repeat([]func(){func() {}}, u.IntN(n)), do)
}

// happen applies a random event to a random installation, if it is running.
func (u *universe) happen() {
	i := u.installations[u.IntN(len(u.installations))]
	if !i.on || i.mute || i.stage != runtime.MachineStageRunning {
		return
	}

	other := u.installations[u.IntN(len(u.installations))]
	kind := u.IntN(14)
	u.note("%d: %s at %d (other %s)", kind, i.name, i.address, other.name)
	u.power(kind, i)
	u.identify(kind, i, other)
}

// power applies an event that switches an installation off.
func (u *universe) power(kind int, i *installation) {
	switch kind {
	case 0: // crash, and perhaps a start
		i.on = false
		if u.IntN(3) > 0 {
			u.later(i, 100, func() { u.boot(i) })
		}
	case 1:
		u.off(i, runtime.MachineStageRebooting, func() { u.later(i, 100, func() { u.boot(i) }) })
	case 2:
		u.off(i, runtime.MachineStageUpgrading, func() { u.later(i, 100, func() { u.boot(i) }) })
	case 3:
		u.off(i, runtime.MachineStageShuttingDown, func() { u.later(i, 200, func() { u.boot(i) }) })
	case 4: // reset
		u.off(i, runtime.MachineStageResetting, func() { u.wipe(i) })
	case 5: // reset of some partitions: the machine is back before the grace period ends
		u.off(i, runtime.MachineStageResetting, func() { u.later(i, 15, func() { u.boot(i) }) })
	case 6: // reset, and installed again
		name := u.choose(i.name, u.newName())
		u.off(i, runtime.MachineStageResetting, func() {
			u.wipe(i)
			u.install(name, i.uuid, i.address)
		})
	}
}

// identify applies an event that changes names, addresses or identities.
func (u *universe) identify(kind int, i, other *installation) {
	switch kind {
	case 7, 8: // rename
		i.name = u.newName()
	case 9: // swap of two addresses; one of the kubelets may be unable to report it for a while
		if other != i && other.on && other.stage == runtime.MachineStageRunning {
			i.address, other.address = other.address, i.address
			i.mute = u.IntN(2) == 0
			u.later(i, 100, func() { i.mute = false })
		}
	case 10: // re-created under its name
		u.wipe(i)
		u.install(i.name, u.hardwareID(), i.address)
	case 11: // another machine has its address
		u.wipe(i)
		u.install(u.newName(), u.hardwareID(), i.address)
	case 12: // clone of the disk of a machine, which stays off for a while, on other hardware
		i.on = false
		u.install(u.newName(), fmt.Sprintf("cccccccc-0000-0000-0000-%012x", u.Uint64()&0xffffffffffff), u.freeAddress()).nodeID = i.nodeID
		u.later(i, 100, func() { u.boot(i) })
	case 13: // more of the same hardware
		u.install(u.newName(), i.uuid, u.freeAddress())
	}
}

func (u *universe) choose(a, b string) string {
	if u.IntN(2) == 0 {
		return a
	}

	return b
}

// kubelets registers and updates Nodes as kubelets do, and marks silent ones as Kubernetes does.
func (u *universe) kubelets() {
	for _, i := range u.installations {
		if !i.on || i.mute || i.stage != runtime.MachineStageRunning {
			continue
		}

		if u.nodes[i.name] == nil {
			u.nodes[i.name] = &corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: i.name, UID: types.UID(fmt.Sprint(u.Uint64()))},
				Status:     corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{OSImage: "Talos (v1.13.5)"}},
			}
		}

		u.heartbeat[i.name], u.address[i.name] = u.elapsed, i.address
	}

	for name, node := range u.nodes {
		status := corev1.ConditionTrue
		if u.elapsed-u.heartbeat[name] > simulatedTimeout {
			status = corev1.ConditionUnknown
		}

		node = node.DeepCopy()
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}
		u.nodes[name] = node

		if err := u.indexer.Update(node); err != nil {
			u.t.Fatal(err)
		}
	}
}

// observe updates the inventory as the reflector does. It may detect late that a machine no longer responds.
func (u *universe) observe() {
	for name := range u.nodes {
		switch i := u.at(u.address[name]); {
		case i == nil || i.split:
			if u.IntN(2) == 0 {
				u.inventory.MarkUnreachable(name, "no answer")
			}
		case i.name == name:
			u.inventory.Replace(name, machine.Machine{
				Nodename: name, NodeID: i.nodeID, Stage: i.stage, System: hardware.SystemInformationSpec{UUID: i.uuid},
			})
		default:
			u.inventory.MarkMismatch(name, i.name, "another machine")
		}
	}
}

// lead starts a controller without history.
func (u *universe) lead() {
	client := &fake.Clientset{}
	client.AddReactor("*", "*", u.serve)

	factory := informers.NewSharedInformerFactory(client, 0)
	u.inventory = inventory.New(u.clock.Now)
	u.indexer = factory.Core().V1().Nodes().Informer().GetIndexer()

	for _, node := range u.nodes {
		if err := u.indexer.Add(node); err != nil {
			u.t.Fatal(err)
		}
	}

	var err error

	u.controller, err = New(Config{
		Client: client, Nodes: factory.Core().V1().Nodes(), Inventory: u.inventory, Recorder: record.NewFakeRecorder(1 << 16), Clock: u.clock,
		Settings: func() config.CompiledLifecycle {
			return config.CompiledLifecycle{GracePeriod: simulatedGrace, OutOfServiceTaint: true}
		},
		Selected: func(*corev1.Node, machine.Machine) bool { return true },
	})
	if err == nil {
		u.controller.observed.read()
		err = u.controller.loadDeletions(u.t.Context())
	}

	if err != nil {
		u.t.Fatal(err)
	}
}

// serve is the API server.
func (u *universe) serve(action kubetesting.Action) (handled bool, object kuberuntime.Object, err error) {
	switch action := action.(type) {
	case kubetesting.CreateActionImpl:
		event, ok := action.Object.(*corev1.Event)
		if !ok {
			return true, nil, errors.New("unexpected object")
		}

		event.CreationTimestamp = metav1.NewTime(u.clock.Now())
		u.events = append(u.events, *event)

		return true, event, nil
	case kubetesting.ListActionImpl:
		return true, &corev1.EventList{Items: u.events}, nil
	case kubetesting.GetActionImpl:
		if node := u.nodes[action.Name]; node != nil {
			return true, node.DeepCopy(), nil
		}

		return true, nil, apierrors.NewNotFound(corev1.Resource("nodes"), action.Name)
	case kubetesting.PatchActionImpl: // of taints
		return true, u.nodes[action.Name].DeepCopy(), nil
	case kubetesting.DeleteActionImpl:
		u.checkDeletion(action.Name)
		delete(u.nodes, action.Name)

		return true, nil, nil
	default:
		return true, nil, fmt.Errorf("unexpected action %T", action)
	}
}

// checkDeletion compares a deletion with the ground truth.
func (u *universe) checkDeletion(name string) {
	u.note("deleted %s", name)

	for _, i := range u.installations {
		if i.name == name {
			u.t.Errorf("seed %d: node %s was deleted, but its machine exists (on: %v, at %d)\n%q", u.seed, name, i.on, i.address, u.log)
		}
	}

	responding := 0

	for other := range u.nodes {
		if i := u.at(u.address[other]); i != nil && i.name == other {
			responding++
		}
	}

	// The controller still counts machines that have just stopped.
	if tolerated := len(u.nodes)/4 + 1; 2*(responding+tolerated) < len(u.nodes) {
		u.t.Errorf("seed %d: node %s was deleted while %d of %d machines respond", u.seed, name, responding, len(u.nodes))
	}

	recent := 1

	for _, at := range u.deleted {
		// The controller counts a jump of the clock as a few seconds, which elapsed does not include.
		if u.elapsed-at < 9*time.Minute {
			recent++
		}
	}

	if limit := max(1, len(u.nodes)/10); recent > limit {
		u.t.Errorf("seed %d: %d of %d nodes were deleted in ten minutes", u.seed, recent, len(u.nodes))
	}

	u.deleted = append(u.deleted, u.elapsed)
}

// run simulates a few hours, and returns the number of deletions.
func (u *universe) run() int {
	for range 4 + u.IntN(12) {
		u.install(u.newName(), u.hardwareID(), u.freeAddress())
	}

	u.lead()

	for range 250 {
		u.elapsed += simulatedTick
		u.clock.Step(simulatedTick)

		if u.IntN(4) == 0 && len(u.installations) > 0 {
			u.happen()
		}

		u.rareEvents()

		for _, i := range slices.Clone(u.installations) {
			if len(i.then) > 0 {
				next := i.then[0]
				i.then = i.then[1:]
				next()
			}
		}

		u.kubelets()
		u.observe()
		u.sync()
	}

	return len(u.deleted)
}

// rareEvents may apply a leader change, a jump of the clock, a network split, or the deletion of a Node by an administrator.
func (u *universe) rareEvents() {
	switch u.IntN(400) {
	case 0:
		u.note("new leader")
		u.lead()
	case 1:
		u.note("clock jump")
		u.clock.Step(24 * time.Hour)
	case 2:
		u.note("split")

		for _, i := range u.installations {
			i.split = u.IntN(2) == 0
		}
	case 3, 4:
		for _, i := range u.installations {
			i.split = false
		}
	case 5:
		for name := range u.nodes {
			u.forget(name)
			delete(u.nodes, name)

			break
		}
	}
}

func (u *universe) forget(name string) {
	u.inventory.Forget(name)

	if err := u.indexer.Delete(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
		u.t.Fatal(err)
	}
}

// sync lets the controller check all Nodes, as it does after a tick.
func (u *universe) sync() {
	u.controller.observed.read()

	ctx := klog.NewContext(u.t.Context(), klog.Logger{}) // which discards

	for _, key := range u.indexer.ListKeys() {
		// Changes and ticks do not queue Nodes that are ready and whose machines respond.
		if nodespec.IsReady(u.nodes[key]) && u.inventory.Get(key).Condition == inventory.Current && u.controller.histories[key] == (history{uid: u.nodes[key].UID}) {
			continue
		}

		if err := u.controller.sync(ctx, key); err != nil {
			u.t.Fatal(err)
		}

		if u.nodes[key] == nil {
			u.forget(key)
		}
	}
}

var count = flag.Uint64("histories", 20, "number of random histories")

// The model decides by the installations that exist, not by what the controller observes. Discovery is disabled: it
// deletes the Nodes of machines that exist, but have been off for an hour.
func TestController_RandomHistories(t *testing.T) {
	t.Parallel()

	total := 0

	for seed := range *count {
		u := &universe{
			Rand: rand.New(rand.NewPCG(seed, 1)), t: t, seed: seed, clock: clocktesting.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)), //nolint:gosec // reproducible
			nodes: map[string]*corev1.Node{}, address: map[string]int{}, heartbeat: map[string]time.Duration{},
		}

		total += u.run()

		if t.Failed() {
			return
		}
	}

	t.Logf("%d histories with %d deletions, none of them wrong", *count, total)

	if total < int(*count) {
		t.Errorf("got only %d deletions", total)
	}
}
