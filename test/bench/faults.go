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
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

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

// fault causes a fault and ends it. It returns how long talos-ccm took from the end until all Nodes were up to date, and
// what else was observed.
type fault struct {
	name string
	run  func(s *steps) (recovery time.Duration, note string)
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

		s := &steps{trial: t, ctx: ctx}

		recovery, note := f.run(s)
		if s.err != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", f.name, s.err))
			recovery, note = 0, "failed"
		}

		versions, wrong, _ := t.verdict()
		fmt.Fprintf(w, "| %s | %.1f s | %s | %d | %d |\n", f.name, recovery.Seconds(), note, versions-checked, wrong-reported)
		checked, reported = versions, wrong
	}

	_, _, violated := t.verdict()

	return errors.Join(err, violated)
}

// steps are what a fault does with a trial. After an error, its methods do nothing.
type steps struct {
	*trial

	ctx context.Context //nolint:containedctx // of one fault
	err error
}

func (s *steps) try(step func() error) {
	if s.err == nil {
		s.err = step()
	}
}

// value returns what a step returns.
func value[T any](s *steps, step func() (T, error)) (result T) {
	s.try(func() (err error) {
		result, err = step()

		return err
	})

	return result
}

func (s *steps) pause(d time.Duration) {
	s.try(func() error {
		select {
		case <-time.After(d):
			return nil
		case <-s.ctx.Done():
			return s.ctx.Err()
		}
	})
}

func (s *steps) order(action string, machines []Machine) {
	s.try(func() error { return s.trial.order(action, machines) })
}

func (s *steps) call(method string, argument any) {
	s.try(func() error { return s.fleet.Call(method, argument, &struct{}{}) })
}

func (s *steps) change(machines []Machine) {
	s.try(func() error { return s.trial.change(machines) })
}

func (s *steps) recover(machines []Machine) time.Duration {
	return value(s, func() (time.Duration, error) { return s.trial.recover(s.ctx, machines) })
}

func (s *steps) register(machines []Machine) {
	s.try(func() error { return s.trial.register(s.ctx, machines) })
}

func (s *steps) awaitLeader(former string) (holder string) {
	return value(s, func() (string, error) { return awaitLeader(s.ctx, s.client, former) })
}

// workers returns up to n machines that run no talos-ccm.
func (s *steps) workers(n int) []Machine {
	return s.managed[controlPlanes:min(controlPlanes+n, len(s.managed))]
}

// changeAndRecover changes some workers and waits until all Nodes are up to date.
func (s *steps) changeAndRecover() time.Duration {
	s.change(s.workers(some))

	return s.recover(s.managed)
}

func apiServerAway(s *steps) (recovery time.Duration, note string) {
	s.cluster.StopAPIServer(s.ctx)
	s.pause(apiServerOutage / 2)
	s.change(s.workers(some))
	s.pause(apiServerOutage / 2)
	s.try(func() error { return s.cluster.StartAPIServer(s.ctx) })
	recovery = s.recover(s.managed)
	_, starts := s.leader.running()

	return recovery, fmt.Sprintf("talos-ccm was started %d times", starts)
}

func etcdSlow(s *steps) (recovery time.Duration, note string) {
	slow, end := context.WithTimeout(s.ctx, faultDuration)
	defer end()

	var (
		pid     = s.cluster.PIDs()["etcd"]
		stopped = make(chan error, 1)
	)

	go func() {
		var err error
		for slow.Err() == nil && err == nil {
			err = syscall.Kill(pid, syscall.SIGSTOP)

			time.Sleep(etcdDelay)

			err = errors.Join(err, syscall.Kill(pid, syscall.SIGCONT))

			time.Sleep(etcdDelay / 10)
		}

		stopped <- err
	}()

	during := s.changeAndRecover()
	s.err = errors.Join(s.err, <-stopped)

	return s.changeAndRecover(), fmt.Sprintf("50 changes took %.1f s during the fault", during.Seconds())
}

func flap(s *steps) (recovery time.Duration, note string) {
	machines := s.workers(200)
	cycles := 0

	for start := time.Now(); s.err == nil && time.Since(start) < faultDuration; cycles++ {
		s.order("stop", machines)
		s.pause(2 * time.Second)
		s.change(machines)
		s.order("start", machines)
		s.pause(3 * time.Second)
	}

	s.order("stop", machines)
	s.change(machines)
	s.order("start", machines)

	return s.recover(s.managed), fmt.Sprintf("%d machines stopped %d times", len(machines), cycles+1)
}

func losePower(s *steps) (recovery time.Duration, note string) {
	machines := s.workers(20)
	start := time.Now()

	s.order("black-hole", machines)
	s.order("stop", machines)
	s.change(machines)

	process, _ := s.leader.running()
	noticed := value(s, func() (time.Duration, error) {
		return process.awaitMetric(s.ctx, `talosccm_machines{condition="Unreachable"}`, func(n float64) bool { return n >= float64(len(machines)) })
	})

	s.pause(powerOff - time.Since(start))
	s.order("start", machines)
	s.order("reconnect", machines)

	return s.recover(s.managed), fmt.Sprintf("all noticed after %.0f s", noticed.Seconds())
}

func absurdValues(s *steps) (recovery time.Duration, note string) {
	machine := s.workers(1)

	s.order(absurd, machine)
	s.change(s.workers(some)) // the absurd machine's own change cannot be read
	s.pause(faultDuration)
	s.recover(s.workers(some)[1:])

	note = fmt.Sprintf("%d Node not updated during the fault", len(s.outdated(machine, s.seen())))

	s.order(sane, machine)

	return s.recover(s.managed), note
}

func rotateTalosCA(s *steps) (recovery time.Duration, note string) {
	rotate := func(old talostest.OldCA) time.Duration {
		s.call("Fleet.RotateCA", old)
		s.order("break connections", s.managed)
		s.change(s.managed)

		return s.recover(s.managed)
	}

	accepted := rotate(talostest.AcceptOldCA)

	return rotate(talostest.DropOldCA), fmt.Sprintf("%.1f s while the old CA was accepted; then another CA at once", accepted.Seconds())
}

func rotateKubernetesCA(s *steps) (recovery time.Duration, note string) {
	s.try(func() error { return s.cluster.RotateServingCA(s.ctx) })
	s.try(func() error { return s.setKubeconfig(s.cluster.Kubeconfig(), s.managed[:controlPlanes]) })

	return s.changeAndRecover(), ""
}

// clocks returns a fault in which the machines issue and verify certificates by a wrong clock.
func clocks(shift time.Duration) func(*steps) (time.Duration, string) {
	return func(s *steps) (recovery time.Duration, note string) {
		// A change of its addresses makes a machine issue another certificate.
		shiftAndChange := func(shift time.Duration) {
			s.call("Fleet.ShiftClock", shift)
			s.change(s.managed)
			s.order("break connections", s.managed)
			s.pause(time.Second)
			s.change(s.managed)
		}

		shiftAndChange(shift)
		s.pause(faultDuration)

		note = fmt.Sprintf("%d Nodes not updated during the fault", len(s.outdated(s.managed, s.seen())))

		shiftAndChange(0)

		return s.recover(s.managed), note
	}
}

// secondInstance is the source address of the requests of a second instance to the API server.
const secondInstance = "127.0.0.2"

func pauseLeader(s *steps) (recovery time.Duration, note string) {
	second := value(s, s.startSecond)
	if second == nil {
		return 0, ""
	}
	defer func() { s.err = errors.Join(s.err, second.stop()) }()

	s.pause(calm)

	holder := s.awaitLeader("")
	first, _ := s.leader.running()

	// The leader is stopped while it writes.
	s.change(s.managed)
	s.try(func() error { return first.signal(syscall.SIGSTOP) })

	stopped := time.Now()

	s.awaitLeader(holder)

	led := time.Now()
	recovery = s.recover(s.managed)

	// It finds changes to write when it continues.
	s.pause(leaderStop - time.Since(stopped))
	s.change(s.managed)
	s.try(func() error { return first.signal(syscall.SIGCONT) })
	s.pause(calm)

	writes := value(s, func() (int, error) { return s.checkWrites(led) })

	s.recover(s.managed)

	return led.Sub(stopped) + recovery, fmt.Sprintf("second instance led after %.1f s, %d writes; first: none", led.Sub(stopped).Seconds(), writes)
}

// startSecond starts a second instance, whose requests to the API server come from another address.
func (t *trial) startSecond() (*service, error) {
	endpoint, err := forward(strings.TrimPrefix(t.cluster.Endpoint(), "https://"), secondInstance)
	if err != nil {
		return nil, err
	}

	kubeconfig := strings.ReplaceAll(string(t.cluster.Kubeconfig()), t.cluster.Endpoint(), "https://"+endpoint)
	if err := t.setKubeconfig([]byte(kubeconfig), t.managed[1:controlPlanes]); err != nil {
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

// requests returns the requests that talos-ccm has sent since a time: lists and watches of Nodes, and writes of Nodes and
// CSRs.
func (t *trial) requests(since time.Time) (events []auditv1.Event, err error) {
	file, err := os.Open(t.auditLog())
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

func halfCut(s *steps) (recovery time.Duration, note string) {
	half := s.workers(len(s.managed) / 2)

	s.order("black-hole", half)
	s.change(s.managed)
	others := s.recover(s.managed[controlPlanes+len(half):])
	s.pause(faultDuration)
	s.order("reconnect", half)

	return s.recover(s.managed), fmt.Sprintf("changes of the other half took %.1f s", others.Seconds())
}

// relist stops talos-ccm for less than its lease. The API server that it finds then does not know the version of Nodes
// from which the informers want to continue.
func relist(s *steps) (recovery time.Duration, note string) {
	start := time.Now()
	leader, _ := s.leader.running()
	touch := []byte(`{"metadata":{"annotations":{"bench/touched":"` + start.String() + `"}}}`)

	s.try(func() error { return leader.signal(syscall.SIGSTOP) })
	s.cluster.StopAPIServer(s.ctx)
	s.try(func() error { return s.cluster.StartAPIServer(s.ctx) })
	s.try(func() error {
		return inParallel(s.managed, func(m Machine) error {
			_, err := s.client.CoreV1().Nodes().Patch(s.ctx, m.Nodename, types.MergePatchType, touch, metav1.PatchOptions{})

			return err
		})
	})
	s.change(s.managed)
	s.err = errors.Join(s.err, leader.signal(syscall.SIGCONT))
	recovery = s.recover(s.managed)

	// The informers wait for up to a minute before they connect again.
	s.try(func() error {
		err := wait.PollUntilContextTimeout(s.ctx, time.Second, 2*time.Minute, true, func(context.Context) (bool, error) {
			events, err := s.requests(start)

			// Informers list by a watch that begins with all objects.
			return slices.ContainsFunc(events, func(event auditv1.Event) bool { return strings.Contains(event.RequestURI, "sendInitialEvents=true") }), err
		})
		if err != nil {
			err = fmt.Errorf("wait until talos-ccm lists Nodes again: %w", err)
		}

		return err
	})

	_, starts := s.leader.running()

	return recovery, fmt.Sprintf("Nodes listed again, talos-ccm was started %d times", starts)
}

func recreate(s *steps) (recovery time.Duration, note string) {
	machines := s.workers(some)

	for range 3 {
		s.change(machines)
		s.try(func() error {
			return inParallel(machines, func(m Machine) error { return s.recreateNode(s.ctx, m) })
		})
	}

	return s.recover(s.managed), ""
}

func blackHoled(s *steps) (recovery time.Duration, note string) {
	holes, added := s.spare[:blackHoles], s.spare[blackHoles:blackHoles+1]

	s.order("black-hole", holes)
	s.register(holes)
	s.register(added)

	return s.recover(added), "of the new Node"
}

// blackHoledAtStart continues [blackHoled].
func blackHoledAtStart(s *steps) (recovery time.Duration, note string) {
	added := s.spare[blackHoles+1:]

	s.try(s.leader.restart)
	s.register(added)

	return s.recover(added), fmt.Sprintf("of the new Node, with the %s until Talos restarts the service", restartDelay)
}
