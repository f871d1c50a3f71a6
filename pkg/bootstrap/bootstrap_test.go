package bootstrap_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cosi-project/runtime/pkg/safe"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/talos-ccm/talos-ccm/pkg/bootstrap"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

// anotherAdmin is another admin kubeconfig for the same API server, as Talos issues it every six months.
func anotherAdmin(t *testing.T) []byte {
	t.Helper()

	config, err := controlPlane.UserConfig("talos:admin", "system:masters")
	must(t, err)

	return kube.Kubeconfig(config)
}

func TestBootstrap_WritesPrivateFiles(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})

	if got := slices.Sorted(maps.Keys(s.files(t))); !slices.Equal(got, []string{"kubeconfig", "token"}) {
		t.Errorf("the folder has %q", got)
	}

	for name := range s.files(t) {
		info, err := os.Stat(filepath.Join(s.dir, name))
		must(t, err)

		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %s", name, info.Mode())
		}
	}

	config, err := clientcmd.BuildConfigFromFlags("", s.sut.Kubeconfig())
	must(t, err)

	if config.Host != controlPlane.Endpoint() || !bytes.Equal(config.CAData, controlPlane.CA()) || config.BearerTokenFile != filepath.Join(s.dir, "token") {
		t.Errorf("the kubeconfig says %+v", config)
	}

	s.requireWorks(t)
}

func TestBootstrap_RequestsTokenForOneHour(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})

	parts := strings.Split(s.token(t), ".")
	if len(parts) != 3 {
		t.Fatalf("the token has %d parts", len(parts))
	}

	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	must(t, err)

	var claims struct {
		Subject string `json:"sub"`
		Issued  int64  `json:"iat"`
		Expires int64  `json:"exp"`
	}

	must(t, json.Unmarshal(payload, &claims))

	if claims.Subject != "system:serviceaccount:kube-system:talos-ccm" || claims.Expires-claims.Issued > 3600 {
		t.Errorf("the token says %+v", claims)
	}

	if got := gauge(t, "talosccm_token_expiry_timestamp_seconds"); got != float64(claims.Expires) {
		t.Errorf("the metric says that it expires at %.0f, want %d", got, claims.Expires)
	}
}

// gauge is the value of a metric without labels.
func gauge(t *testing.T, name string) float64 {
	t.Helper()

	families, err := legacyregistry.DefaultGatherer.Gather()
	must(t, err)

	for _, family := range families {
		if family.GetName() == name {
			return family.GetMetric()[0].GetGauge().GetValue()
		}
	}

	t.Fatalf("there is no metric %s", name)

	return 0
}

func TestBootstrap_NeverWritesAdminCredentials(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})
	admin := controlPlane.Config()

	for name, content := range s.files(t) {
		for what, secret := range map[string][]byte{"key": admin.KeyData, "certificate": admin.CertData} {
			if found := formIn(t, content, secret); found != "" {
				t.Errorf("%s has the admin's %s, as %s", name, what, found)
			}
		}
	}

	// The search finds what it is there to find.
	if formIn(t, controlPlane.Kubeconfig(), admin.KeyData) == "" {
		t.Error("the search does not find the key in the admin kubeconfig")
	}
}

// formIn tells in which form content has a PEM document; empty if in none.
func formIn(t *testing.T, content, document []byte) string {
	t.Helper()

	block, _ := pem.Decode(document)
	if block == nil {
		t.Fatal("not PEM")
	}

	// The second line: the first is the same in many documents.
	line := bytes.Split(document, []byte("\n"))[2]

	for form, needle := range map[string][]byte{
		"PEM":           line,
		"DER":           block.Bytes[len(block.Bytes)/2:],
		"base64 of PEM": []byte(base64.StdEncoding.EncodeToString(document)),
		"base64 of DER": []byte(base64.StdEncoding.EncodeToString(block.Bytes)),
	} {
		if bytes.Contains(content, needle) {
			return form
		}
	}

	return ""
}

func TestBootstrap_WaitsForAdminKubeconfig(t *testing.T) {
	s := newSuite(t, nil)
	s.start(t, clock.RealClock{})

	eventually(t, "it was asked for twice", func() bool { return s.admin.reads.Load() >= 2 })

	if got := s.files(t); len(got) != 0 {
		t.Fatalf("there are files: %q", slices.Collect(maps.Keys(got)))
	}

	began := time.Now()

	must(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), controlPlane.Kubeconfig()))
	await(t, s.ready, "the credentials are there")
	t.Logf("credentials %s after the admin kubeconfig", time.Since(began).Round(10*time.Millisecond))
	s.requireWorks(t)
}

func TestBootstrap_RetriesInvalidAdminKubeconfig(t *testing.T) {
	for name, content := range map[string]string{"no YAML": "\t", "no kubeconfig": "a: b"} {
		t.Run(name, func(t *testing.T) {
			s := newSuite(t, []byte(content))
			s.start(t, clock.RealClock{})
			eventually(t, "it was read twice", func() bool { return s.admin.reads.Load() >= 2 })

			must(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), controlPlane.Kubeconfig()))
			await(t, s.ready, "the credentials are there")
			s.requireWorks(t)
		})
	}
}

func TestBootstrap_WaitsForAPIServer(t *testing.T) {
	controlPlane.StopAPIServer(t.Context())
	t.Cleanup(func() { must(t, controlPlane.StartAPIServer(context.WithoutCancel(t.Context()))) })

	s := newSuite(t, controlPlane.Kubeconfig())
	s.start(t, clock.RealClock{})
	eventually(t, "it was tried twice", func() bool { return s.admin.reads.Load() >= 2 })

	must(t, controlPlane.StartAPIServer(t.Context()))

	began := time.Now()

	await(t, s.ready, "the credentials are there")
	t.Logf("credentials %s after the API server", time.Since(began).Round(10*time.Millisecond))
	s.requireWorks(t)
}

func TestBootstrap_RenewsEveryTenMinutes(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Now())
	s := bootstrapped(t, clk)
	first := s.token(t)

	eventually(t, "the renewal is planned", clk.HasWaiters)

	reads := s.admin.reads.Load()

	clk.Step(9 * time.Minute)

	if !clk.HasWaiters() || s.admin.reads.Load() != reads {
		t.Error("it was renewed too early")
	}

	clk.Step(time.Minute)
	s.awaitOther(t, first)
	s.requireWorks(t)
}

func TestBootstrap_LimitsRenewalsUnderClockSkew(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Now().Add(2 * time.Hour))
	s := bootstrapped(t, clk)
	first := s.token(t)

	eventually(t, "the renewal is planned", clk.HasWaiters)
	clk.Step(30 * time.Second)

	if !clk.HasWaiters() {
		t.Error("the token was renewed within half a minute")
	}

	clk.Step(30 * time.Second)
	s.awaitOther(t, first)
}

func TestBootstrap_RenewsOnNewAdminKubeconfig(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})

	for range 3 {
		s.awaitWatch(t)

		before := s.token(t)

		must(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), anotherAdmin(t)))
		s.awaitOther(t, before)
	}

	select {
	case <-s.ended:
		t.Error("the bootstrap has ended, although the API server is where it was")
	default:
	}
}

func TestBootstrap_RenewsOnNewAdminKubeconfigAfterWatchBroke(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})
	s.awaitWatch(t)

	before := s.token(t)

	s.machine.BreakStreams()
	must(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), anotherAdmin(t)))
	s.awaitOther(t, before)
}

func TestBootstrap_RenewsOnNewAdminKubeconfigAfterTalosRestart(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})
	s.awaitWatch(t)

	before := s.token(t)

	must(t, s.machine.Stop(t.Context()))
	must(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), anotherAdmin(t)))
	s.machine.Start()
	s.awaitOther(t, before)
}

// hastyTalos issues another kubeconfig right after it was asked for one.
type hastyTalos struct {
	bootstrap.Admin

	issue func()
}

func (a *hastyTalos) WatchLocalhostAdminKubeconfig(ctx context.Context, ch chan<- state.Event) error {
	if a.issue != nil {
		a.issue()
		a.issue = nil
	}

	return a.Admin.WatchLocalhostAdminKubeconfig(ctx, ch)
}

func TestBootstrap_RenewsOnAdminKubeconfigIssuedBeforeWatch(t *testing.T) {
	s := newSuite(t, controlPlane.Kubeconfig())
	second := anotherAdmin(t)

	s.admin.Admin = &hastyTalos{Admin: s.admin.Admin, issue: func() {
		if err := s.machine.SetLocalhostAdminKubeconfig(t.Context(), second); err != nil {
			t.Error(err)
		}
	}}
	s.start(t, clock.RealClock{})
	eventually(t, "the second admin kubeconfig is used", func() bool { return s.admin.reads.Load() >= 2 })
}

func TestBootstrap_IgnoresOtherTalosSecrets(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})
	s.awaitWatch(t)
	eventually(t, "the watch has told what there is", func() bool { return s.admin.events.Load() > 0 })

	reads, events := s.admin.reads.Load(), s.admin.events.Load()

	must(t, safe.StateModify(t.Context(), s.machine.State(), secrets.NewKubernetes(), func(r *secrets.Kubernetes) error {
		r.TypedSpec().SchedulerKubeconfig = "another"

		return nil
	}))

	eventually(t, "the change was seen", func() bool { return s.admin.events.Load() > events })

	for range 2 {
		before := s.token(t)

		must(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), anotherAdmin(t)))
		s.awaitOther(t, before)
		s.awaitWatch(t)
	}

	if got := s.admin.reads.Load() - reads; got != 2 {
		t.Errorf("the admin kubeconfig was used %d times more, want 2", got)
	}
}

func TestBootstrap_ReturnsOnNewAPIServerCA(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})
	s.awaitWatch(t)

	must(t, controlPlane.RotateServingCA(t.Context()))

	began := time.Now()

	must(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), controlPlane.Kubeconfig()))
	await(t, s.ended, "the run ends")
	t.Logf("the new kubeconfig was there after %s", time.Since(began).Round(10*time.Millisecond))
	s.requireWorks(t)

	// The next run starts from there.
	s.start(t, clock.RealClock{})
	await(t, s.ready, "the credentials are there")
	s.requireWorks(t)
}

func TestBootstrap_ClosesAdminConnections(t *testing.T) {
	proxy := newProxy(t, strings.TrimPrefix(controlPlane.Endpoint(), "https://"))

	admin := controlPlane.Config()
	admin.Host = "https://" + proxy.listener.Addr().String()

	s := newSuite(t, kube.Kubeconfig(admin))
	s.start(t, clock.RealClock{})
	await(t, s.ready, "the credentials are there")

	if proxy.accepted.Load() == 0 {
		t.Fatal("the API server was reached some other way: the test does not test")
	}

	eventually(t, "no connection is open", func() bool { return proxy.open.Load() == 0 })
}

// proxy passes connections on and counts them.
type proxy struct {
	listener       net.Listener
	target         string
	accepted, open atomic.Int64
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = listener.Close() })

	p := &proxy{listener: listener, target: target}

	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}

			p.accepted.Add(1)
			p.open.Add(1)

			go p.pass(client)
		}
	}()

	return p
}

// pass returns when the client has closed its connection.
func (p *proxy) pass(client net.Conn) {
	defer p.open.Add(-1)
	defer client.Close()

	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}

	defer server.Close()

	go func() { _, _ = io.Copy(client, server) }()

	_, _ = io.Copy(server, client)
}
