package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cosi-project/runtime/api/v1alpha1"
	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/resources/network"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// calm is how long two instances have to become idle.
	calm = 15 * time.Second

	blackHoles = 600
)

// fault causes a fault and ends it. It returns how long talos-ccm took from the end until all Nodes were up to date, and
// what else was observed.
type fault struct {
	name string
	run  func(t *trial) (recovery time.Duration, note string)
}

var faults = []fault{
	{"API server down for 2 min", func(t *trial) (time.Duration, string) {
		t.cluster.StopAPIServer(t.ctx)
		t.pause(time.Minute)
		t.change(t.workers(burst))
		t.pause(time.Minute)
		t.try(func() error { return t.cluster.StartAPIServer(t.ctx) })

		return t.recover(t.managed), fmt.Sprintf("talos-ccm was started %d times", t.leader.running().starts)
	}},
	{"etcd stopped for 500 ms again and again, for 1 min", stopEtcd},
	{"200 machines flap for 1 min", func(t *trial) (time.Duration, string) {
		machines := t.workers(200)

		for start, cycles := time.Now(), 1; ; cycles++ {
			t.each(machines, func(m machine) error { return m.Stop(t.ctx) })
			t.pause(2 * time.Second)
			t.change(machines)
			all(machines, machine.Start)

			if t.err != nil || time.Since(start) > time.Minute {
				return t.recover(t.managed), fmt.Sprintf("%d machines stopped %d times", len(machines), cycles)
			}

			t.pause(3 * time.Second)
		}
	}},
	{"20 machines lose power, and return with other addresses after 5 min", func(t *trial) (time.Duration, string) {
		machines, start := t.workers(20), time.Now()

		t.each(machines, machine.BlackHole)
		t.each(machines, func(m machine) error { return m.Stop(t.ctx) })
		t.change(machines)
		t.leader.running().awaitMetric(`talosccm_machines{condition="Unreachable"}`, len(machines))

		noticed := time.Since(start)

		t.pause(5*time.Minute - noticed)
		all(machines, machine.Start)
		all(machines, machine.Reconnect)

		return t.recover(t.managed), fmt.Sprintf("all marked Unreachable after %.0f s", noticed.Seconds())
	}},
	{"a machine with 10,000 more addresses and a tag of 1 MiB", growMachine},
	{"one machine floods", flood},
	{"2,000 Nodes of one attacker, then a new Node", attack},
	{"CA of Talos replaced, all connections broken, twice", func(t *trial) (time.Duration, string) {
		rotate := func(old talostest.OldCA) time.Duration {
			t.try(func() error { return t.talos.RotateCA(old) })
			all(t.managed, machine.BreakConnections)
			t.change(t.managed)

			return t.recover(t.managed)
		}

		accepted := rotate(talostest.AcceptOldCA)

		return rotate(talostest.DropOldCA), fmt.Sprintf("%.1f s while the old CA was accepted; then another CA at once", accepted.Seconds())
	}},
	{"CA of the API server replaced", func(t *trial) (time.Duration, string) {
		t.try(func() error { return t.cluster.RotateServingCA(t.ctx) })
		t.each(t.managed[:controlPlanes], func(m machine) error { return m.SetLocalhostAdminKubeconfig(t.ctx, t.cluster.Kubeconfig()) })

		return t.changeAndRecover(), ""
	}},
	{"clocks of all machines an hour ahead for 1 min, all connections broken", shiftClocks(time.Hour)},
	{"clocks of all machines an hour behind for 1 min, all connections broken", shiftClocks(-time.Hour)},
	{"leader stopped by SIGSTOP for 1 min", pauseLeader},
	{"no network to half of the machines for 1 min", func(t *trial) (time.Duration, string) {
		half := t.workers(len(t.managed) / 2)

		t.each(half, machine.BlackHole)
		t.change(t.managed)
		others := t.recover(t.managed[controlPlanes+len(half):])
		t.pause(time.Minute)
		all(half, machine.Reconnect)

		return t.recover(t.managed), fmt.Sprintf("changes of the other half took %.1f s", others.Seconds())
	}},
	{"API server restarted, and all Nodes and machines changed, before talos-ccm continues", relist},
	{"50 Nodes deleted and registered three times while their machines change", func(t *trial) (time.Duration, string) {
		for range 3 {
			t.change(t.workers(burst))
			t.recreate(t.workers(burst))
		}

		return t.recover(t.managed), ""
	}},
	{"600 Nodes whose machines drop packets, then a new Node", func(t *trial) (time.Duration, string) {
		t.each(t.spare[:blackHoles], machine.BlackHole)
		t.each(t.spare[:blackHoles], t.register)
		t.each(t.spare[blackHoles:blackHoles+1], t.register)

		return t.recover(t.spare[blackHoles : blackHoles+1]), "of the new Node"
	}},
	{"the same, and talos-ccm restarts", func(t *trial) (time.Duration, string) {
		t.try(t.leader.running().stop)
		t.each(t.spare[blackHoles+1:], t.register)

		return t.recover(t.spare[blackHoles+1:]), fmt.Sprintf("of the new Node, with the %s until Talos restarts the service", restartDelay)
	}},
}

// runFaults runs the faults whose names contain a text, or all, and prints a table.
func runFaults(ctx context.Context, w io.Writer, executable string, machines int, text string) (err error) {
	selected := slices.DeleteFunc(slices.Clone(faults), func(f fault) bool { return text != "all" && !strings.Contains(f.name, text) })
	if len(selected) == 0 {
		return fmt.Errorf("-faults: no name of a fault contains %q", text)
	}

	t, err := newTrial(ctx, executable, machines, blackHoles+2)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.close()) }()

	fmt.Fprintf(w, "\n%d machines\n\n| fault | recovered after | observed | versions of Nodes | wrong |\n|---|---:|---|---:|---:|\n", machines)

	var (
		checked, reported int
		violated          error
	)

	for _, f := range selected {
		recovery, note := f.run(t)
		if t.err != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", f.name, t.err))
			recovery, note, t.err = 0, "failed", nil
		}

		versions, wrong, violations := t.verdict()
		fmt.Fprintf(w, "| %s | %.1f s | %s | %d | %d |\n", f.name, recovery.Seconds(), note, versions-checked, wrong-reported)
		checked, reported, violated = versions, wrong, violations
	}

	return errors.Join(err, violated)
}

// workers returns up to n machines that run no talos-ccm.
func (t *trial) workers(n int) []machine {
	return t.managed[controlPlanes:min(controlPlanes+n, len(t.managed))]
}

// changeAndRecover changes some workers and waits until all Nodes are up to date.
func (t *trial) changeAndRecover() time.Duration {
	t.change(t.workers(burst))

	return t.recover(t.managed)
}

func stopEtcd(t *trial) (recovery time.Duration, note string) {
	ctx, cancel := context.WithTimeout(t.ctx, time.Minute)
	defer cancel()

	etcd, running := t.cluster.PIDs()["etcd"]
	if !running {
		t.fail(errors.New("etcd has ended"))

		return 0, ""
	}

	var failed error

	var group sync.WaitGroup

	group.Go(func() {
		wait.UntilWithContext(ctx, func(context.Context) {
			err := syscall.Kill(etcd, syscall.SIGSTOP)

			time.Sleep(500 * time.Millisecond)

			failed = errors.Join(failed, err, syscall.Kill(etcd, syscall.SIGCONT))
		}, 50*time.Millisecond)
	})

	during := t.changeAndRecover()

	group.Wait()
	t.fail(failed)

	return t.changeAndRecover(), fmt.Sprintf("50 changes took %.1f s during the fault", during.Seconds())
}

func growMachine(t *trial) (recovery time.Duration, note string) {
	const link, addresses, tag = "eth1", 10_000, 1 << 20

	m := t.workers(1)[0]

	// set changes each of the addresses, and replaces the tags.
	set := func(change func(netip.Prefix) error, tags map[string]string) {
		for i := range addresses {
			t.try(func() error { return change(host(netip.AddrFrom4([4]byte{10, 48, byte(i / 250), byte(i%250 + 1)}))) })
		}

		t.try(func() error {
			return m.UpdatePlatform(t.ctx, func(spec *runtime.PlatformMetadataSpec) { spec.Tags = tags })
		})
	}

	set(func(p netip.Prefix) error { return m.AddAddress(t.ctx, link, p) }, map[string]string{"oversized": strings.Repeat("x", tag)})
	t.change(t.workers(burst)) // the oversized machine's own change cannot be read
	t.pause(time.Minute)
	t.recover(t.workers(burst)[1:])

	note = fmt.Sprintf("%d Node not updated during the fault", len(t.outdated(t.workers(1), t.seen())))

	set(func(p netip.Prefix) error {
		id := network.AddressID(link, p)

		return m.State().Destroy(t.ctx, resource.NewMetadata(network.NamespaceName, network.AddressStatusType, id, resource.VersionUndefined))
	}, nil)

	return t.recover(t.managed), note
}

// flood lets a machine send what needs the most memory and time: a resource with 20,000 labels, and empty events.
func flood(t *trial) (recovery time.Duration, note string) {
	attacker, other, leader := t.workers(1)[0], t.workers(2)[1:], t.leader.running()
	labels := map[string]string{}

	for i := range 20_000 {
		labels[strconv.Itoa(i)] = ""
	}

	events := &v1alpha1.WatchResponse{Event: make([]*v1alpha1.Event, 1<<20)}
	for i := range events.Event {
		events.Event[i] = &v1alpha1.Event{}
	}

	// latency returns the median and the longest time of changes of another machine in milliseconds, and the highest usage.
	latency := func() (median, longest, resident, goroutines float64) {
		var took []float64

		for range 15 {
			start := time.Now()
			t.change(other)
			t.await("the other Node is up to date", pollInterval, func() bool { return len(t.outdated(other, t.seen())) == 0 })

			took = append(took, time.Since(start).Seconds()*1000)
			resident, goroutines = max(resident, leader.usage().resident), max(goroutines, leader.metric("go_goroutines"))
			t.pause(time.Second)
		}

		slices.Sort(took)

		return took[len(took)/2], took[len(took)-1], resident, goroutines
	}

	median, _, resident, goroutines := latency()

	attacker.Lie(func(request proto.Message, stream grpc.ServerStream, _ func() error) error {
		list, isList := request.(*v1alpha1.ListRequest)
		if !isList {
			return errors.Join(stream.SendMsg(&v1alpha1.WatchResponse{}), stream.SendMsg(events))
		}

		return stream.SendMsg(&v1alpha1.ListResponse{Resource: &v1alpha1.Resource{
			Metadata: &v1alpha1.Metadata{
				Namespace: list.GetNamespace(), Type: list.GetType(), Id: "x", Version: "1", Phase: "running", Labels: labels,
			},
			Spec: &v1alpha1.Spec{},
		}})
	})
	attacker.BreakConnections()

	medianThen, longestThen, residentThen, goroutinesThen := latency()
	note = fmt.Sprintf("change of another machine %.0f ms, then %.0f (at most %.0f); resident %.0f MiB, then %.0f; goroutines %.0f, then %.0f",
		median, medianThen, longestThen, resident, residentThen, goroutines, goroutinesThen)

	attacker.Lie(nil)
	t.change([]machine{attacker})

	return t.recover(t.managed), note + fmt.Sprintf(", after it %.0f", leader.metric("go_goroutines"))
}

// stall sends a part of what it could, and then nothing.
func stall(request proto.Message, stream grpc.ServerStream, _ func() error) error {
	typed, _ := request.(interface {
		GetNamespace() string
		GetType() string
	})
	large := &v1alpha1.Resource{
		Metadata: &v1alpha1.Metadata{Namespace: typed.GetNamespace(), Type: typed.GetType(), Id: "x", Version: "1", Phase: "running"},
		Spec:     &v1alpha1.Spec{YamlSpec: strings.Repeat("x", 100<<10)},
	}

	if _, isList := request.(*v1alpha1.ListRequest); isList {
		_ = stream.SendMsg(&v1alpha1.ListResponse{Resource: large})
	} else {
		_ = stream.SendMsg(&v1alpha1.WatchResponse{})
		_ = stream.SendMsg(&v1alpha1.WatchResponse{Event: []*v1alpha1.Event{{Resource: large}}})
	}

	<-stream.Context().Done()

	return stream.Context().Err()
}

// attack registers Nodes whose machines send much, and never all. Several Nodes have the same address.
func attack(t *trial) (recovery time.Duration, note string) {
	const (
		nodes     = 2000
		addresses = 400
	)

	machines, honest, other, leader := t.spare[:addresses], t.spare[blackHoles:blackHoles+1], t.workers(1), t.leader.running()

	var names []string

	t.mu.Lock()

	for i := range nodes {
		name := fmt.Sprintf("attacker-%04d", i)
		names = append(names, name)
		t.expected[name] = &expectation{addresses: []netip.Addr{machines[i%addresses].Address()}}
	}

	t.mu.Unlock()

	all(machines, func(m machine) { m.Lie(stall) })

	resident, goroutines := leader.usage().resident, leader.metric("go_goroutines")

	t.try(func() error {
		return inParallel(names, func(name string) error {
			_, err := t.cluster.RegisterNode(t.ctx, kube.NodeSpec{Name: name, NodeIPs: t.expected[name].addresses})

			return err
		})
	})

	t.change(other)

	changed := t.recover(other)

	t.each(honest, t.register)

	joined, residentThen, goroutinesThen := t.recover(honest), 0.0, 0.0

	for range 60 {
		residentThen, goroutinesThen = max(residentThen, leader.usage().resident), max(goroutinesThen, leader.metric("go_goroutines"))
		t.pause(time.Second)
	}

	all(machines, func(m machine) { m.Lie(nil) })
	t.try(func() error {
		return inParallel(append(names, honest[0].Nodename()), func(name string) error {
			return t.client.CoreV1().Nodes().Delete(t.ctx, name, metav1.DeleteOptions{})
		})
	})

	return joined, fmt.Sprintf("of the new Node; change of another %.1f s; resident %.0f MiB, then %.0f; goroutines %.0f, then %.0f; talos-ccm was started %d times",
		changed.Seconds(), resident, residentThen, goroutines, goroutinesThen, t.leader.running().starts)
}

// shiftClocks returns a fault in which the machines issue and verify certificates by a wrong clock.
func shiftClocks(shift time.Duration) func(*trial) (time.Duration, string) {
	return func(t *trial) (recovery time.Duration, note string) {
		shiftAndChange := func(shift time.Duration) {
			t.clock.shift.Store(int64(shift))
			all(t.managed, machine.RenewCertificate)
			all(t.managed, machine.BreakConnections)
			t.pause(time.Second)
			t.change(t.managed)
		}

		shiftAndChange(shift)
		t.pause(time.Minute)

		note = fmt.Sprintf("%d Nodes not updated during the fault", len(t.outdated(t.managed, t.seen())))

		shiftAndChange(0)

		return t.recover(t.managed), note
	}
}

func pauseLeader(t *trial) (recovery time.Duration, note string) {
	const name = "second"

	executable := value(t.bed, func() (string, error) { return build(t.ctx, filepath.Dir(t.executable), name) })
	second := t.startService(1, executable)
	defer func() { t.fail(second.stop()) }()

	t.pause(calm)

	holder, first := t.awaitLeader(""), t.leader.running()

	// The leader is stopped while it writes.
	t.change(t.managed)
	t.try(func() error { return first.signal(syscall.SIGSTOP) })

	stopped := time.Now()

	t.awaitLeader(holder)

	led := time.Now()
	recovery = t.recover(t.managed)

	// It finds changes to write when it continues.
	t.pause(time.Minute - time.Since(stopped))
	t.change(t.managed)
	t.fail(first.signal(syscall.SIGCONT))
	t.pause(calm)

	writes := value(t.bed, func() (int, error) { return t.checkWrites(led, name) })

	t.recover(t.managed)

	return led.Sub(stopped) + recovery, fmt.Sprintf("second instance led after %.1f s, %d writes; first: none", led.Sub(stopped).Seconds(), writes)
}

// checkWrites returns how often the second instance has written since it led, and an error if the first has. The version
// of the second contains its name.
func (t *trial) checkWrites(led time.Time, name string) (bySecond int, err error) {
	events, err := t.requests(led)

	for _, event := range events {
		switch {
		case event.Verb == "list", event.Verb == "watch":
		case strings.Contains(event.UserAgent, name):
			bySecond++
		default:
			err = errors.Join(err, fmt.Errorf("the first instance wrote %s after the second led: %s %s",
				event.RequestReceivedTimestamp.Sub(led), event.Verb, event.RequestURI))
		}
	}

	if bySecond == 0 {
		err = errors.Join(err, errors.New("the second instance wrote nothing"))
	}

	return bySecond, err
}

// requests returns the requests that talos-ccm has sent since a time: lists and watches of Nodes, and writes of Nodes and
// CSRs.
func (t *trial) requests(since time.Time) (events []auditv1.Event, err error) {
	file, err := os.Open(t.auditLog)
	if err != nil {
		return nil, err
	}
	defer file.Close() //nolint:errcheck // only read

	for scanner := bufio.NewScanner(file); scanner.Scan(); {
		var event auditv1.Event
		if err := json.Unmarshal(scanner.Bytes(), &event); err != nil {
			return nil, fmt.Errorf("parse audit log: %w", err)
		}

		if strings.HasSuffix(event.User.Username, ":"+extension.ServiceAccount) && event.RequestReceivedTimestamp.After(since) {
			events = append(events, event)
		}
	}

	return events, nil
}

// relist stops talos-ccm for less than its lease. The API server that it finds then does not know the version of Nodes
// from which the informers want to continue.
func relist(t *trial) (recovery time.Duration, note string) {
	start := time.Now()
	leader := t.leader.running()
	touch := []byte(`{"metadata":{"annotations":{"bench/touched":"` + start.String() + `"}}}`)

	t.try(func() error { return leader.signal(syscall.SIGSTOP) })
	t.cluster.StopAPIServer(t.ctx)
	t.try(func() error { return t.cluster.StartAPIServer(t.ctx) })
	t.each(t.managed, func(m machine) error {
		_, err := t.client.CoreV1().Nodes().Patch(t.ctx, m.Nodename(), types.MergePatchType, touch, metav1.PatchOptions{})

		return err
	})
	t.change(t.managed)
	t.fail(leader.signal(syscall.SIGCONT))
	recovery = t.recover(t.managed)

	// The informers wait for up to a minute before they connect again.
	t.await("talos-ccm lists Nodes again", time.Second, func() bool {
		events, err := t.requests(start)
		t.fail(err)

		// Informers list by a watch that begins with all objects.
		return slices.ContainsFunc(events, func(event auditv1.Event) bool { return strings.Contains(event.RequestURI, "sendInitialEvents=true") })
	})

	return recovery, fmt.Sprintf("Nodes listed again, talos-ccm was started %d times", t.leader.running().starts)
}
