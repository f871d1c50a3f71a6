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

// anotherAdmin returns a new admin kubeconfig for the same API server. Talos issues one every six months.
func anotherAdmin(t *testing.T) []byte {
	t.Helper()

	config, err := controlPlane.UserConfig("talos:admin", "system:masters")
	must(t, err)

	return kube.Kubeconfig(config)
}

func TestBootstrap_WritesPrivateFiles(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})

	if got := slices.Sorted(maps.Keys(s.files(t))); !slices.Equal(got, []string{"kubeconfig", "token"}) {
		t.Errorf("got files %q, want kubeconfig and token", got)
	}

	for name := range s.files(t) {
		info, err := os.Stat(filepath.Join(s.dir, name))
		must(t, err)

		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %s, want 0600", name, info.Mode())
		}
	}

	config, err := clientcmd.BuildConfigFromFlags("", s.sut.Kubeconfig())
	must(t, err)

	if config.Host != controlPlane.Endpoint() || !bytes.Equal(config.CAData, controlPlane.CA()) || config.BearerTokenFile != filepath.Join(s.dir, "token") {
		t.Errorf("unexpected kubeconfig %+v", config)
	}

	s.requireWorks(t)
}

func TestBootstrap_RequestsTokenForOneHour(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})

	parts := strings.Split(s.token(t), ".")
	if len(parts) != 3 {
		t.Fatalf("token has %d parts, want 3", len(parts))
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
		t.Errorf("unexpected claims %+v", claims)
	}

	if got := gauge(t, "talosccm_token_expiry_timestamp_seconds"); got != float64(claims.Expires) {
		t.Errorf("metric is %.0f, want %d", got, claims.Expires)
	}
}

// gauge returns the value of a metric without labels.
func gauge(t *testing.T, name string) float64 {
	t.Helper()

	families, err := legacyregistry.DefaultGatherer.Gather()
	must(t, err)

	for _, family := range families {
		if family.GetName() == name {
			return family.GetMetric()[0].GetGauge().GetValue()
		}
	}

	t.Fatalf("metric %s not found", name)

	return 0
}

func TestBootstrap_NeverWritesAdminCredentials(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})
	admin := controlPlane.Config()

	for name, content := range s.files(t) {
		for what, secret := range map[string][]byte{"key": admin.KeyData, "certificate": admin.CertData} {
			if found := formIn(t, content, secret); found != "" {
				t.Errorf("%s contains the %s of the admin as %s", name, what, found)
			}
		}
	}

	// Verify that the search works.
	if formIn(t, controlPlane.Kubeconfig(), admin.KeyData) == "" {
		t.Error("search does not find the key in the admin kubeconfig")
	}
}

// formIn returns the form in which content contains a PEM document; empty if it does not.
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

	eventually(t, "admin kubeconfig was read twice", func() bool { return s.admin.reads.Load() >= 2 })

	if got := s.files(t); len(got) != 0 {
		t.Fatalf("got files %q, want none", slices.Collect(maps.Keys(got)))
	}

	began := time.Now()

	must(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), controlPlane.Kubeconfig()))
	await(t, s.ready, "credentials are written")
	t.Logf("credentials %s after the admin kubeconfig", time.Since(began).Round(10*time.Millisecond))
	s.requireWorks(t)
}

func TestBootstrap_RetriesInvalidAdminKubeconfig(t *testing.T) {
	for name, content := range map[string]string{"not YAML": "\t", "not a kubeconfig": "a: b"} {
		t.Run(name, func(t *testing.T) {
			s := newSuite(t, []byte(content))
			s.start(t, clock.RealClock{})
			eventually(t, "admin kubeconfig was read twice", func() bool { return s.admin.reads.Load() >= 2 })

			must(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), controlPlane.Kubeconfig()))
			await(t, s.ready, "credentials are written")
			s.requireWorks(t)
		})
	}
}

func TestBootstrap_WaitsForAPIServer(t *testing.T) {
	controlPlane.StopAPIServer(t.Context())
	t.Cleanup(func() { must(t, controlPlane.StartAPIServer(context.WithoutCancel(t.Context()))) })

	s := newSuite(t, controlPlane.Kubeconfig())
	s.start(t, clock.RealClock{})
	eventually(t, "two attempts were made", func() bool { return s.admin.reads.Load() >= 2 })

	must(t, controlPlane.StartAPIServer(t.Context()))

	began := time.Now()

	await(t, s.ready, "credentials are written")
	t.Logf("credentials %s after the API server", time.Since(began).Round(10*time.Millisecond))
	s.requireWorks(t)
}

func TestBootstrap_RenewsEveryTenMinutes(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Now())
	s := bootstrapped(t, clk)
	first := s.token(t)

	eventually(t, "renewal is scheduled", clk.HasWaiters)

	reads := s.admin.reads.Load()

	clk.Step(9 * time.Minute)

	if !clk.HasWaiters() || s.admin.reads.Load() != reads {
		t.Error("token was renewed before ten minutes")
	}

	clk.Step(time.Minute)
	s.awaitOther(t, first)
	s.requireWorks(t)
}

func TestBootstrap_LimitsRenewalsUnderClockSkew(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Now().Add(2 * time.Hour))
	s := bootstrapped(t, clk)
	first := s.token(t)

	eventually(t, "renewal is scheduled", clk.HasWaiters)
	clk.Step(30 * time.Second)

	if !clk.HasWaiters() {
		t.Error("token was renewed within 30 s")
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
		t.Error("Run returned although the API server endpoint and CA are unchanged")
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

// hastyTalos issues a new kubeconfig between the first read and the watch.
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
	eventually(t, "second admin kubeconfig is used", func() bool { return s.admin.reads.Load() >= 2 })
}

func TestBootstrap_IgnoresOtherTalosSecrets(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})
	s.awaitWatch(t)
	eventually(t, "watch has sent the initial state", func() bool { return s.admin.events.Load() > 0 })

	reads, events := s.admin.reads.Load(), s.admin.events.Load()

	must(t, safe.StateModify(t.Context(), s.machine.State(), secrets.NewKubernetes(), func(r *secrets.Kubernetes) error {
		r.TypedSpec().SchedulerKubeconfig = "another"

		return nil
	}))

	eventually(t, "change was observed", func() bool { return s.admin.events.Load() > events })

	for range 2 {
		before := s.token(t)

		must(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), anotherAdmin(t)))
		s.awaitOther(t, before)
		s.awaitWatch(t)
	}

	if got := s.admin.reads.Load() - reads; got != 2 {
		t.Errorf("admin kubeconfig was read %d more times, want 2", got)
	}
}

func TestBootstrap_ReturnsOnNewAPIServerCA(t *testing.T) {
	s := bootstrapped(t, clock.RealClock{})
	s.awaitWatch(t)

	must(t, controlPlane.RotateServingCA(t.Context()))

	began := time.Now()

	must(t, s.machine.SetLocalhostAdminKubeconfig(t.Context(), controlPlane.Kubeconfig()))
	await(t, s.ended, "Run returns")
	t.Logf("new kubeconfig written after %s", time.Since(began).Round(10*time.Millisecond))
	s.requireWorks(t)

	// The next run uses the new CA.
	s.start(t, clock.RealClock{})
	await(t, s.ready, "credentials are written")
	s.requireWorks(t)
}

func TestBootstrap_ClosesAdminConnections(t *testing.T) {
	proxy := newProxy(t, strings.TrimPrefix(controlPlane.Endpoint(), "https://"))

	admin := controlPlane.Config()
	admin.Host = "https://" + proxy.listener.Addr().String()

	s := newSuite(t, kube.Kubeconfig(admin))
	s.start(t, clock.RealClock{})
	await(t, s.ready, "credentials are written")

	if proxy.accepted.Load() == 0 {
		t.Fatal("no connection through the proxy")
	}

	eventually(t, "no connection is open", func() bool { return proxy.open.Load() == 0 })
}

// proxy forwards and counts connections.
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

// pass forwards a connection until the client closes it.
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
