package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/talostest"
)

const (
	apiServerOutage = 2 * time.Minute
	// powerOff is longer than TCP keepalive takes to notice it.
	powerOff   = 5 * time.Minute
	leaderStop = time.Minute
	// calm is how long two instances have to become idle.
	calm = 15 * time.Second
	// faultDuration is how long the other faults last.
	faultDuration = time.Minute

	etcdDelay  = 500 * time.Millisecond
	blackHoles = 600
	some       = 50 // machines that change at the same time
)

// fault causes a fault and ends it. It returns how long talos-ccm took from the end until all Nodes were up to date,
// and what else was observed.
type fault struct {
	name string
	run  func(ctx context.Context, t *trial) (recovery time.Duration, note string, err error)
}

var faults = []fault{
	{"API server away for 2 min", apiServerAway},
	{"etcd stopped for 500 ms again and again, for 1 min", etcdSlow},
	{"200 machines flap for 1 min", flap},
	{"20 machines lose power, and return with other addresses after 5 min", losePower},
	{"a machine with 10,000 more addresses and a tag of 1 MiB", absurdValues},
	{"CA of Talos replaced, all connections broken, twice", rotateTalosCA},
	{"CA of the API server replaced", rotateKubernetesCA},
	{"clocks of all machines an hour ahead for 1 min, all connections broken", clocks(time.Hour)},
	{"clocks of all machines an hour behind for 1 min, all connections broken", clocks(-time.Hour)},
	{"leader stopped by SIGSTOP for 1 min", pauseLeader},
	{"no network to half of the machines for 1 min", halfCut},
	{"API server restarted, and all Nodes and machines changed, before talos-ccm continues", relist},
	{"50 Nodes deleted and registered three times while their machines change", recreate},
	{"600 Nodes whose machines drop packets, then a new Node", blackHoled},
	{"the same, and talos-ccm restarts", blackHoledAtStart},
}

// runFaults runs the faults whose names contain a text and prints a table.
func runFaults(ctx context.Context, w io.Writer, executable string, machines int, text string) (err error) {
	t, err := newTrial(ctx, executable, machines, blackHoles+2)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.close()) }()

	fmt.Fprintf(w, "\n%d machines\n\n| fault | recovered after | observed | versions of Nodes | wrong |\n|---|---:|---|---:|---:|\n", machines)

	checked, reported := 0, 0

	for _, f := range faults {
		if !strings.Contains(f.name, text) {
			continue
		}

		recovery, note, failed := f.run(ctx, t)
		if failed != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", f.name, failed))
			note = "failed"
		}

		versions, wrong, _ := t.verdict()
		fmt.Fprintf(w, "| %s | %.1f s | %s | %d | %d |\n", f.name, recovery.Seconds(), note, versions-checked, wrong-reported)
		checked, reported = versions, wrong
	}

	_, _, violated := t.verdict()

	return errors.Join(err, violated)
}

// pause returns early with an error if ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// workers returns up to n machines that run no talos-ccm.
func (t *trial) workers(n int) []Machine {
	return t.managed[controlPlanes:min(controlPlanes+n, len(t.managed))]
}

// changeAndRecover changes some workers and waits until all Nodes are up to date.
func (t *trial) changeAndRecover(ctx context.Context) (time.Duration, error) {
	if err := t.change(t.workers(some)); err != nil {
		return 0, err
	}

	return t.recover(ctx, t.managed)
}

func apiServerAway(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
	t.cluster.StopAPIServer(ctx)

	if err := errors.Join(pause(ctx, apiServerOutage/2), t.change(t.workers(some)), pause(ctx, apiServerOutage/2)); err != nil {
		return 0, "", err
	}

	if err := t.cluster.StartAPIServer(ctx); err != nil {
		return 0, "", err
	}

	recovery, err = t.recover(ctx, t.managed)
	_, starts := t.leader.running()

	return recovery, fmt.Sprintf("talos-ccm was started %d times", starts), err
}

func etcdSlow(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
	slow, end := context.WithTimeout(ctx, faultDuration)
	defer end()

	var (
		pid     = t.cluster.PIDs()["etcd"]
		stopped = make(chan error, 1)
	)

	go func() {
		var err error
		for slow.Err() == nil && err == nil {
			err = syscall.Kill(pid, syscall.SIGSTOP)
			_ = pause(ctx, etcdDelay)
			err = errors.Join(err, syscall.Kill(pid, syscall.SIGCONT))
			_ = pause(ctx, etcdDelay/10)
		}

		stopped <- err
	}()

	during, err := t.changeAndRecover(ctx)
	if err := errors.Join(err, <-stopped); err != nil {
		return 0, "", err
	}

	recovery, err = t.changeAndRecover(ctx)

	return recovery, fmt.Sprintf("50 changes took %.1f s during the fault", during.Seconds()), err
}

func flap(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
	machines := t.workers(200)
	cycles := 0

	for start := time.Now(); time.Since(start) < faultDuration; cycles++ {
		err := errors.Join(t.order("stop", machines), pause(ctx, 2*time.Second), t.change(machines), t.order("start", machines), pause(ctx, 3*time.Second))
		if err != nil {
			return 0, "", err
		}
	}

	if err := errors.Join(t.order("stop", machines), t.change(machines), t.order("start", machines)); err != nil {
		return 0, "", err
	}

	recovery, err = t.recover(ctx, t.managed)

	return recovery, fmt.Sprintf("%d machines stopped %d times", len(machines), cycles+1), err
}

func losePower(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
	machines := t.workers(20)
	start := time.Now()

	if err := errors.Join(t.order("black-hole", machines), t.order("stop", machines), t.change(machines)); err != nil {
		return 0, "", err
	}

	process, _ := t.leader.running()

	noticed, err := awaitMetric(ctx, process, `talosccm_machines{condition="Unreachable"}`, func(n float64) bool { return n >= float64(len(machines)) })
	if err != nil {
		return 0, "", err
	}

	err = errors.Join(pause(ctx, powerOff-time.Since(start)), t.order("start", machines), t.order("reconnect", machines))
	if err != nil {
		return 0, "", err
	}

	recovery, err = t.recover(ctx, t.managed)

	return recovery, fmt.Sprintf("all noticed after %.0f s", noticed.Seconds()), err
}

// awaitMetric waits until a metric has a value, and returns how long that took.
func awaitMetric(ctx context.Context, process *running, name string, wanted func(float64) bool) (time.Duration, error) {
	start := time.Now()

	err := wait.PollUntilContextCancel(ctx, time.Second, true, func(ctx context.Context) (bool, error) {
		value, err := process.metric(ctx, name)

		return wanted(value), err
	})
	if err != nil {
		err = fmt.Errorf("wait for metric %s: %w", name, err)
	}

	return time.Since(start), err
}

func absurdValues(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
	absurd := t.workers(1)

	if err := t.order("become absurd", absurd); err != nil {
		return 0, "", err
	}

	// The machine's own change cannot be read.
	if err := errors.Join(t.change(t.workers(some)), pause(ctx, faultDuration)); err != nil {
		return 0, "", err
	}

	if _, err := t.recover(ctx, t.workers(some)[1:]); err != nil {
		return 0, "", err
	}

	outdated := len(t.outdated(absurd, t.seen()))

	if err := t.order("become sane", absurd); err != nil {
		return 0, "", err
	}

	recovery, err = t.recover(ctx, t.managed)

	return recovery, fmt.Sprintf("%d Node not updated during the fault", outdated), err
}

func rotateTalosCA(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
	rotate := func(old talostest.OldCA) (time.Duration, error) {
		err := errors.Join(t.fleet.Call("Fleet.RotateCA", old, &struct{}{}), t.order("break connections", t.managed), t.change(t.managed))
		if err != nil {
			return 0, err
		}

		return t.recover(ctx, t.managed)
	}

	accepted, err := rotate(talostest.AcceptOldCA)
	if err != nil {
		return 0, "", err
	}

	recovery, err = rotate(talostest.DropOldCA)

	return recovery, fmt.Sprintf("%.1f s while the old CA was accepted; then another CA at once", accepted.Seconds()), err
}

func rotateKubernetesCA(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
	if err := t.cluster.RotateServingCA(ctx); err != nil {
		return 0, "", err
	}

	order := Order{Action: "set kubeconfig", Kubeconfig: t.cluster.Kubeconfig()}
	if err := t.do(order, t.managed[:controlPlanes]); err != nil {
		return 0, "", err
	}

	recovery, err = t.changeAndRecover(ctx)

	return recovery, "", err
}

// clocks returns a fault in which the machines issue and verify certificates by a wrong clock.
func clocks(shift time.Duration) func(context.Context, *trial) (time.Duration, string, error) {
	return func(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
		// A change of its addresses makes a machine issue another certificate.
		shiftAndChange := func(shift time.Duration) error {
			return errors.Join(t.fleet.Call("Fleet.ShiftClock", shift, &struct{}{}), t.change(t.managed), t.order("break connections", t.managed),
				pause(ctx, time.Second), t.change(t.managed))
		}

		if err := errors.Join(shiftAndChange(shift), pause(ctx, faultDuration)); err != nil {
			return 0, "", err
		}

		note = fmt.Sprintf("%d Nodes not updated during the fault", len(t.outdated(t.managed, t.seen())))

		if err := shiftAndChange(0); err != nil {
			return 0, "", err
		}

		recovery, err = t.recover(ctx, t.managed)

		return recovery, note, err
	}
}

// secondInstance is the source address of the requests of a second instance to the API server.
const secondInstance = "127.0.0.2"

func pauseLeader(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
	second, err := t.startSecond()
	if err != nil {
		return 0, "", err
	}
	defer func() { err = errors.Join(err, second.stop()) }()

	if err := pause(ctx, calm); err != nil {
		return 0, "", err
	}

	holder, err := awaitLeader(ctx, t.client, "")
	if err != nil {
		return 0, "", err
	}

	first, _ := t.leader.running()

	// The leader is stopped while it writes.
	if err := errors.Join(t.change(t.managed), first.signal(syscall.SIGSTOP)); err != nil {
		return 0, "", err
	}

	stopped := time.Now()

	if _, err := awaitLeader(ctx, t.client, holder); err != nil {
		return 0, "", err
	}

	led := time.Now()

	if recovery, err = t.recover(ctx, t.managed); err != nil {
		return 0, "", err
	}

	// It finds changes to write when it continues.
	err = errors.Join(pause(ctx, leaderStop-time.Since(stopped)), t.change(t.managed), first.signal(syscall.SIGCONT), pause(ctx, calm))
	if err != nil {
		return 0, "", err
	}

	writes, err := t.checkWrites(led)
	_, recoverErr := t.recover(ctx, t.managed)
	note = fmt.Sprintf("second instance led after %.1f s, %d writes; first: none", led.Sub(stopped).Seconds(), writes)

	return led.Sub(stopped) + recovery, note, errors.Join(err, recoverErr)
}

// startSecond starts a second instance, whose requests to the API server come from another address.
func (t *trial) startSecond() (*service, error) {
	endpoint, err := forward(strings.TrimPrefix(t.cluster.Endpoint(), "https://"), secondInstance)
	if err != nil {
		return nil, err
	}

	kubeconfig := strings.ReplaceAll(string(t.cluster.Kubeconfig()), t.cluster.Endpoint(), "https://"+endpoint)
	if err := t.do(Order{Action: "set kubeconfig", Kubeconfig: []byte(kubeconfig)}, t.managed[1:controlPlanes]); err != nil {
		return nil, err
	}

	return t.startService(1)
}

// forward forwards connections to a target from a source address, until the program ends.
func forward(target, source string) (endpoint string, err error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}

	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}

	join := func(to, from net.Conn) {
		_, _ = io.Copy(to, from)
		_ = to.Close()
	}

	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}

			server, err := dialer.Dial("tcp", target)
			if err != nil {
				_ = client.Close()

				continue
			}

			go join(server, client)
			go join(client, server)
		}
	}()

	return listener.Addr().String(), nil
}

// auditEvent is an entry of the API server's audit log.
type auditEvent struct {
	Stage      string `json:"stage"`
	Verb       string `json:"verb"`
	RequestURI string `json:"requestURI"`
	User       struct {
		Username string `json:"username"`
	} `json:"user"`
	SourceIPs                []string         `json:"sourceIPs"`
	RequestReceivedTimestamp metav1.MicroTime `json:"requestReceivedTimestamp"`
}

// requests returns the requests that talos-ccm has sent since a time: lists and watches of Nodes, and writes of Nodes and
// CSRs.
func (t *trial) requests(since time.Time) (events []auditEvent, err error) {
	file, err := os.Open(t.auditLog())
	if err != nil {
		return nil, err
	}
	defer file.Close() //nolint:errcheck // only read

	for scanner := bufio.NewScanner(file); scanner.Scan(); {
		var event auditEvent
		if err := json.Unmarshal(scanner.Bytes(), &event); err != nil {
			return nil, fmt.Errorf("parse audit log: %w", err)
		}

		if strings.HasSuffix(event.User.Username, ":"+extension.ServiceAccount) && event.RequestReceivedTimestamp.After(since) {
			events = append(events, event)
		}
	}

	return events, nil
}

// checkWrites returns how often the second instance has written since it led, and an error if the first has.
func (t *trial) checkWrites(led time.Time) (bySecond int, err error) {
	events, err := t.requests(led)

	for _, event := range events {
		switch {
		case event.Verb == "list", event.Verb == "watch":
		case slices.Contains(event.SourceIPs, secondInstance):
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

func halfCut(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
	half := t.workers(len(t.managed) / 2)
	rest := t.managed[controlPlanes+len(half):]

	if err := errors.Join(t.order("black-hole", half), t.change(t.managed)); err != nil {
		return 0, "", err
	}

	others, err := t.recover(ctx, rest)
	if err != nil {
		return 0, "", err
	}

	if err := errors.Join(pause(ctx, faultDuration), t.order("reconnect", half)); err != nil {
		return 0, "", err
	}

	recovery, err = t.recover(ctx, t.managed)

	return recovery, fmt.Sprintf("changes of the other half took %.1f s", others.Seconds()), err
}

// relist stops talos-ccm for less than its lease. The API server that it finds then does not know the version of Nodes
// from which the informers want to continue.
func relist(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
	start := time.Now()
	leader, _ := t.leader.running()

	if err := leader.signal(syscall.SIGSTOP); err != nil {
		return 0, "", err
	}

	t.cluster.StopAPIServer(ctx)

	touch := []byte(`{"metadata":{"annotations":{"bench/touched":"` + start.String() + `"}}}`)

	err = errors.Join(
		t.cluster.StartAPIServer(ctx),
		inParallel(t.managed, func(m Machine) error {
			_, err := t.client.CoreV1().Nodes().Patch(ctx, m.Nodename, types.MergePatchType, touch, metav1.PatchOptions{})

			return err
		}),
		t.change(t.managed),
		leader.signal(syscall.SIGCONT),
	)
	if err != nil {
		return 0, "", err
	}

	if recovery, err = t.recover(ctx, t.managed); err != nil {
		return 0, "", err
	}

	// The informers wait for up to a minute before they connect again.
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); {
		events, err := t.requests(start)
		if err := errors.Join(err, pause(ctx, time.Second)); err != nil {
			return 0, "", err
		}

		// Informers list by a watch that begins with all objects.
		if slices.ContainsFunc(events, func(event auditEvent) bool { return strings.Contains(event.RequestURI, "sendInitialEvents=true") }) {
			_, starts := t.leader.running()

			return recovery, fmt.Sprintf("Nodes listed again, talos-ccm started %d times", starts), nil
		}
	}

	return 0, "", errors.New("talos-ccm did not list Nodes again")
}

func recreate(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
	machines := t.workers(some)

	for range 3 {
		if err := t.change(machines); err != nil {
			return 0, "", err
		}

		err := inParallel(machines, func(m Machine) error {
			if err := t.client.CoreV1().Nodes().Delete(ctx, m.Nodename, metav1.DeleteOptions{}); err != nil {
				return err
			}

			return t.register(ctx, []Machine{m})
		})
		if err != nil {
			return 0, "", err
		}
	}

	recovery, err = t.recover(ctx, t.managed)

	return recovery, "", err
}

func blackHoled(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
	holes, added := t.spare[:blackHoles], t.spare[blackHoles:blackHoles+1]

	if err := errors.Join(t.order("black-hole", holes), t.register(ctx, holes), t.register(ctx, added)); err != nil {
		return 0, "", err
	}

	recovery, err = t.recover(ctx, added)

	return recovery, "of the new Node", err
}

// blackHoledAtStart continues [blackHoled].
func blackHoledAtStart(ctx context.Context, t *trial) (recovery time.Duration, note string, err error) {
	added := t.spare[blackHoles+1:]

	if err := errors.Join(t.leader.restart(), t.register(ctx, added)); err != nil {
		return 0, "", err
	}

	recovery, err = t.recover(ctx, added)

	return recovery, fmt.Sprintf("of the new Node, with the %s until Talos restarts the service", restartDelay), err
}
